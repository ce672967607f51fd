// Warp collectives of the emulator: the last lane to arrive does the work of all.
#include <emulator/warp.h>

#include <algorithm>
#include <array>

#include <cuda_fp8.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace emulator {

namespace {

// The lanes that take part, each with its operand.
template <class Operand, class Visit>
void each_lane(void* const (&operands)[32], unsigned present, Visit visit) {
  for (; present; present &= present - 1) {
    const int lane = __builtin_ctz(present);
    visit(lane, *static_cast<Operand*>(operands[lane]));
  }
}

struct Shuffle { uint64_t value, result; int source; };
struct Vote { bool predicate; unsigned ballot; };
struct Reduce { uint32_t value; Reduction reduction; bool is_signed; };

}  // namespace

uint64_t shuffle(unsigned mask, uint64_t value, int source, const char* what, const Place& place) {
  Shuffle operand{value, ~uint64_t{0}, source};
  const auto complete = [](void* const(&operands)[32], unsigned present) {
    each_lane<Shuffle>(operands, present, [&](int, Shuffle& lane) {
      if (lane.source < 0 || lane.source >= 32 || !(present >> lane.source & 1)) return;
      lane.result = static_cast<Shuffle*>(operands[lane.source])->value;
    });
  };
  warp_collective(mask, complete, &operand, what, place);
  return operand.result;
}

unsigned vote(unsigned mask, bool predicate, const char* what, const Place& place) {
  Vote operand{predicate, 0};
  const auto complete = [](void* const(&operands)[32], unsigned present) {
    unsigned ballot = 0;
    each_lane<Vote>(operands, present, [&](int lane, Vote& vote) { ballot |= unsigned{vote.predicate} << lane; });
    each_lane<Vote>(operands, present, [&](int, Vote& vote) { vote.ballot = ballot; });
  };
  warp_collective(mask, complete, &operand, what, place);
  return operand.ballot;
}

uint32_t reduce(unsigned mask, uint32_t value, Reduction reduction, bool is_signed, const char* what, const Place& place) {
  Reduce operand{value, reduction, is_signed};
  const auto complete = [](void* const(&operands)[32], unsigned present) {
    const int first = __builtin_ctz(present);
    const Reduce of = *static_cast<Reduce*>(operands[first]);
    const uint32_t flip = of.is_signed ? 0x80000000u : 0;  // makes signed numbers order as unsigned ones
    uint32_t total = of.value;
    each_lane<Reduce>(operands, present & ~(1u << first), [&](int, Reduce& lane) {
      switch (of.reduction) {
        case Reduction::kAdd: total += lane.value; break;
        case Reduction::kMin: total = (lane.value ^ flip) < (total ^ flip) ? lane.value : total; break;
        case Reduction::kMax: total = (lane.value ^ flip) > (total ^ flip) ? lane.value : total; break;
        case Reduction::kAnd: total &= lane.value; break;
        case Reduction::kOr: total |= lane.value; break;
        case Reduction::kXor: total ^= lane.value; break;
      }
    });
    each_lane<Reduce>(operands, present, [&](int, Reduce& lane) { lane.value = total; });
  };
  warp_collective(mask, complete, &operand, what, place);
  return operand.value;
}

// ------------------------------------------------------------------------------------------------------- tensor core

namespace {

float half_value(unsigned code) {
#if defined(__F16C__)
  return _cvtsh_ss(static_cast<unsigned short>(code));
#else
  __half_raw raw;
  raw.x = static_cast<unsigned short>(code);
  return __half2float(__half(raw));
#endif
}

const std::array<float, 256>& e4m3_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table{};
    for (unsigned code = 0; code < table.size(); ++code) {
      const __half_raw raw = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3);
      table[code] = __half2float(__half(raw));
    }
    return table;
  }();
  return values;
}

struct Mma {
  void* d;
  const uint32_t* a;
  const uint32_t* b;
  const void* c;
};

// One 32-bit register as its elements: two of 16 bits or four of 8, the lowest bits first.
template <Element kElement, class T>
void unpack(uint32_t bits, T* out) {
  if constexpr (kElement == Element::kF16) {
    out[0] = half_value(bits & 0xffff), out[1] = half_value(bits >> 16);
  } else if constexpr (kElement == Element::kBF16) {
    out[0] = __builtin_bit_cast(float, bits << 16), out[1] = __builtin_bit_cast(float, bits & 0xffff0000u);
  } else if constexpr (kElement == Element::kE4M3) {
    static const float* values = e4m3_values().data();
    for (int i = 0; i < 4; ++i) out[i] = values[bits >> (8 * i) & 0xff];
  } else {
    for (int i = 0; i < 4; ++i) out[i] = static_cast<int8_t>(bits >> (8 * i));
  }
}

// Fragments, with g = lane / 4, t = lane % 4 and E elements to a register. A lane holds
//   a: rows g and g + 8, k = E t .. E t + E - 1 (registers 0, 1) and the same + 4 E (registers 2, 3)
//   b: column g, k likewise (registers 0, 1)      c, d: rows g (0, 1) and g + 8 (2, 3), columns 2 t and 2 t + 1
template <Element kElement, class T, int kK>
void multiply(void* const (&operands)[32], unsigned) {
  Mma* lanes[32];
  for (int lane = 0; lane < 32; ++lane) lanes[lane] = static_cast<Mma*>(operands[lane]);
  constexpr int kPack = kElement == Element::kF16 || kElement == Element::kBF16 ? 2 : 4;
  constexpr int kHalves = kK / (4 * kPack);
  T a[16][kK], b[kK][8], sums[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const Mma& mma = *lanes[lane];
    const T* c = static_cast<const T*>(mma.c);
    for (int half = 0; half < kHalves; ++half) {
      const int first = kPack * t + 4 * kPack * half;
      unpack<kElement>(mma.a[2 * half], &a[g][first]);
      unpack<kElement>(mma.a[2 * half + 1], &a[g + 8][first]);
      T column[kPack];
      unpack<kElement>(mma.b[half], column);
      for (int i = 0; i < kPack; ++i) b[first + i][g] = column[i];
    }
    for (int i = 0; i < 2; ++i) sums[g][2 * t + i] = c[i], sums[g + 8][2 * t + i] = c[2 + i];
  }
  for (int row = 0; row < 16; ++row) {
    T sum[8];
    for (int column = 0; column < 8; ++column) sum[column] = sums[row][column];
    for (int i = 0; i < kK; ++i) {
      const T left = a[row][i];
      for (int column = 0; column < 8; ++column) sum[column] += left * b[i][column];
    }
    for (int column = 0; column < 8; ++column) sums[row][column] = sum[column];
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    T* d = static_cast<T*>(lanes[lane]->d);
    for (int i = 0; i < 2; ++i) d[i] = sums[g][2 * t + i], d[2 + i] = sums[g + 8][2 * t + i];
  }
}

// The .aligned instructions want all 32 lanes, which a CTA whose last warp is not full does not have.
void whole_warp(Complete complete, void* operand, const char* what, const Place& place) {
  const dim3 block = current->block_dim;
  if (32 * (current->warp + 1) > block.x * block.y * block.z) fail("needs a full warp", place);
  warp_collective(0xffffffffu, complete, operand, what, place);
}

}  // namespace

void mma_m16n8(Element element, int k, void* d, const uint32_t* a, const uint32_t* b, const void* c, const Place& place) {
  Mma operand{d, a, b, c};
  Complete complete = nullptr;
  switch (element) {
    case Element::kF16: complete = k == 8 ? multiply<Element::kF16, float, 8> : multiply<Element::kF16, float, 16>; break;
    case Element::kBF16: complete = k == 8 ? multiply<Element::kBF16, float, 8> : multiply<Element::kBF16, float, 16>; break;
    case Element::kE4M3: complete = k == 16 ? multiply<Element::kE4M3, float, 16> : multiply<Element::kE4M3, float, 32>; break;
    case Element::kS8: complete = k == 16 ? multiply<Element::kS8, int, 16> : multiply<Element::kS8, int, 32>; break;
  }
  whole_warp(complete, &operand, "mma.sync", place);
}

void exchange_matrix(int matrices, bool transposed, uint32_t* registers, const void* row, const Place& place) {
  struct Matrix { int matrices; bool transposed; uint32_t* registers; const uint16_t* row; };
  Matrix operand{matrices, transposed, registers, static_cast<const uint16_t*>(row)};
  const auto complete = [](void* const(&operands)[32], unsigned) {
    Matrix* lanes[32];
    for (int lane = 0; lane < 32; ++lane) lanes[lane] = static_cast<Matrix*>(operands[lane]);
    uint32_t result[32][4];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < lanes[0]->matrices; ++i) {
        const auto element = [&](int r, int c) -> uint32_t { return lanes[8 * i + r]->row[c]; };
        result[lane][i] = lanes[0]->transposed ? element(2 * t, g) | element(2 * t + 1, g) << 16
                                               : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
      }
    }
    for (int lane = 0; lane < 32; ++lane) std::copy_n(result[lane], lanes[0]->matrices, lanes[lane]->registers);
  };
  whole_warp(complete, &operand, "ldmatrix", place);
}

}  // namespace emulator
