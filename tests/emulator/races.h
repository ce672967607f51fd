// Races in shared memory, found exactly: two accesses to a byte, one of them a write, by threads that no barrier orders.
//
// Kernels are compiled with -fsanitize=thread, which calls __tsan_read4(address) and the like at every access; the
// functions are ours (end of runtime.cpp). Order comes from barriers and __syncwarp alone: a shuffle or a vote moves
// registers and orders no memory.
//
// Time counts the events that order accesses; an access is stamped with the time it happened at. A thread may know of
// another's accesses up to a time, kept at three levels because nearly all events concern all of them:
//   barrier_time        everyone knows of everyone           __syncthreads
//   known_[w][v]        warp w knows of warp v               named barriers, atomics
//   warp_time_[w], lane_time_[w][i][j]   within a warp       the above, and __syncwarp
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace emulator {

enum class Access : unsigned char { kRead, kWrite, kAtomic };

struct PastAccess {
  uint32_t stamp;
  uint32_t lanes;
  void* pc;
  unsigned char warp;
  unsigned char bytes;  // of the four of the granule, a mask
  Access access;
};

class Races {
 public:
  static constexpr unsigned kMaxWarps = 32;
  struct Knowledge { uint32_t of[kMaxWarps] = {}; };

  bool on = false;

  // Shared memory of a new CTA: dynamic and static.
  void start(unsigned warps, char* dynamic, size_t dynamic_bytes, char* fixed, size_t fixed_bytes) {
    warps_ = warps;
    regions_[0] = {dynamic, dynamic_bytes, 0};
    regions_[1] = {fixed, fixed_bytes, dynamic_bytes / 4 + 1};
    cells_.resize(dynamic_bytes / 4 + fixed_bytes / 4 + 2);
    barrier_time_ = now_++;  // forgets the last CTA
    std::fill_n(warp_time_, kMaxWarps, 0u);
    std::fill_n(known_, kMaxWarps, Knowledge{});
    lane_time_.assign(size_t{warps} * 32 * 32, 0);
  }

  // Returns the earlier access that this one races with, or null.
  const PastAccess* access(unsigned warp, unsigned lane, const void* address, size_t bytes, Access access, void* pc) {
    for (const Region& region : regions_) {
      const size_t offset = static_cast<size_t>(static_cast<const char*>(address) - region.base);
      if (offset >= region.bytes) continue;
      const size_t end = std::min(offset + bytes, region.bytes);
      for (size_t granule = offset / 4; 4 * granule < end; ++granule) {
        const size_t first = std::max(offset, 4 * granule) - 4 * granule, last = std::min(end - 4 * granule, size_t{4});
        const unsigned mask = ((1u << last) - 1) & ~((1u << first) - 1);
        const PastAccess* other = touch(cells_[region.first_cell + granule], warp, lane, mask, access, pc);
        if (other) return other;
      }
      return nullptr;
    }
    return nullptr;
  }

  void everyone_meets() { barrier_time_ = now_++; }

  void lanes_meet(unsigned warp, unsigned mask, unsigned exists) {
    if (mask == exists) {
      warp_time_[warp] = now_++;
      return;
    }
    uint32_t joined[32] = {};
    for_lanes(mask, [&](unsigned i) {
      for (unsigned j = 0; j < 32; ++j) joined[j] = std::max(joined[j], lane_time(warp, i, j));
    });
    for_lanes(mask, [&](unsigned j) { joined[j] = now_; });
    for_lanes(mask, [&](unsigned i) { std::copy_n(joined, 32, &lane_time(warp, i, 0)); });
    ++now_;
  }

  // A named barrier or an atomic variable gathers what its visitors know, and passes it on.
  void release(unsigned warp, Knowledge& gathered) {
    for (unsigned v = 0; v < warps_; ++v) gathered.of[v] = std::max(gathered.of[v], known_[warp].of[v]);
    gathered.of[warp] = now_++;
  }
  void acquire(unsigned warp, const Knowledge& gathered) {
    for (unsigned v = 0; v < warps_; ++v) known_[warp].of[v] = std::max(known_[warp].of[v], gathered.of[v]);
    warp_time_[warp] = std::max(warp_time_[warp], gathered.of[warp]);
  }

 private:
  struct Region { char* base = nullptr; size_t bytes = 0, first_cell = 0; };
  struct Cell {
    static constexpr unsigned kEntries = 8;
    uint32_t epoch = 0;
    uint32_t count = 0;
    PastAccess past[kEntries];
  };

  template <class Visit> static void for_lanes(unsigned mask, Visit visit) {
    for (; mask; mask &= mask - 1) visit(static_cast<unsigned>(__builtin_ctz(mask)));
  }
  uint32_t& lane_time(unsigned warp, unsigned i, unsigned j) { return lane_time_[(size_t{warp} * 32 + i) * 32 + j]; }

  bool ordered(const PastAccess& past, unsigned warp, unsigned lane) {
    if (past.warp != warp) return past.stamp <= known_[warp].of[past.warp];
    if (past.stamp <= warp_time_[warp]) return true;
    bool all = true;
    for_lanes(past.lanes & ~(1u << lane), [&](unsigned j) { all &= past.stamp <= lane_time(warp, lane, j); });
    return all;
  }

  const PastAccess* touch(Cell& cell, unsigned warp, unsigned lane, unsigned bytes, Access access, void* pc) {
    if (cell.epoch != barrier_time_) cell.epoch = barrier_time_, cell.count = 0;
    unsigned kept = 0;
    PastAccess* same = nullptr;
    for (unsigned i = 0; i < cell.count; ++i) {
      PastAccess& past = cell.past[i];
      const bool conflict = past.access != access || access == Access::kWrite;  // reads with reads, atomics with atomics
      if ((past.bytes & bytes) && conflict && !ordered(past, warp, lane)) return &past;
      // What comes before this write comes before all that it comes before.
      if (access == Access::kWrite && !(past.bytes & ~bytes)) continue;
      cell.past[kept] = past;
      PastAccess& moved = cell.past[kept++];
      if (moved.warp == warp && moved.access == access && moved.bytes == bytes) same = &moved;
    }
    cell.count = kept;
    if (same) {
      same->lanes = same->stamp <= warp_time_[warp] ? 1u << lane : same->lanes | 1u << lane;
      same->stamp = now_;
      same->pc = pc;
      return nullptr;
    }
    PastAccess& entry = cell.count < Cell::kEntries ? cell.past[cell.count++] : cell.past[now_ % Cell::kEntries];
    entry = {now_, 1u << lane, pc, static_cast<unsigned char>(warp), static_cast<unsigned char>(bytes), access};
    return nullptr;
  }

  unsigned warps_ = 0;
  uint32_t now_ = 1, barrier_time_ = 0;
  uint32_t warp_time_[kMaxWarps] = {};
  Knowledge known_[kMaxWarps];
  std::vector<uint32_t> lane_time_;
  Region regions_[2];
  std::vector<Cell> cells_;
};

}  // namespace emulator
