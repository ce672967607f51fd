// The runtime of the emulator: fibers, barriers, warp collectives, and the threads that run CTAs.
//
//   launch     one worker thread a core; each takes the next CTA until none is left or one has failed
//   CTA        a fiber a thread; its stack is kept from CTA to CTA
//   fiber      runs until it waits; then the next runnable fiber is switched to directly
//   failure    the fiber switches to its worker for good, which drops the CTA; the first failure of a launch is reported
#include <emulator/runtime.h>

#include "races.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

// Present only when the process runs under AddressSanitizer.
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void**, const void*, size_t);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
__attribute__((weak)) void __asan_poison_memory_region(const volatile void*, size_t);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void*, size_t);
void* __tls_get_addr(size_t*);  // {module, offset} -> this thread's copy
}

namespace emulator {

thread_local Thread* current = nullptr;

namespace {

constexpr int kWarpSize = 32;
constexpr int kBarriers = 16;  // as the hardware has them; 0 is __syncthreads
constexpr unsigned char kPoison = 0xff;  // NaN in every float type of the kernels, -1 in every integer type
constexpr size_t kSharedAlignment = 1024;

const size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// ---------------------------------------------------------------------------------------------------------- switching

// Callee-saved registers go onto the stack, the stack pointer into *from. No system call: about as dear as two calls.
extern "C" void emulator_switch(void** from, void* to);
extern "C" void emulator_start();
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
  .cfi_startproc
  pushq %rbp
  .cfi_adjust_cfa_offset 8
  .cfi_rel_offset rbp, 0
  pushq %rbx
  .cfi_adjust_cfa_offset 8
  .cfi_rel_offset rbx, 0
  pushq %r12
  .cfi_adjust_cfa_offset 8
  .cfi_rel_offset r12, 0
  pushq %r13
  .cfi_adjust_cfa_offset 8
  .cfi_rel_offset r13, 0
  pushq %r14
  .cfi_adjust_cfa_offset 8
  .cfi_rel_offset r14, 0
  pushq %r15
  .cfi_adjust_cfa_offset 8
  .cfi_rel_offset r15, 0
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  .cfi_adjust_cfa_offset -8
  .cfi_restore r15
  popq %r14
  .cfi_adjust_cfa_offset -8
  .cfi_restore r14
  popq %r13
  .cfi_adjust_cfa_offset -8
  .cfi_restore r13
  popq %r12
  .cfi_adjust_cfa_offset -8
  .cfi_restore r12
  popq %rbx
  .cfi_adjust_cfa_offset -8
  .cfi_restore rbx
  popq %rbp
  .cfi_adjust_cfa_offset -8
  .cfi_restore rbp
  ret
  .cfi_endproc
.size emulator_switch, .-emulator_switch

# First frame of a fiber: there is no caller to unwind to.
.globl emulator_start
.hidden emulator_start
.type emulator_start, @function
emulator_start:
  .cfi_startproc
  .cfi_undefined rip
  xorl %ebp, %ebp
  call emulator_fiber_main
  ud2
  .cfi_endproc
.size emulator_start, .-emulator_start
)");

struct Context {
  void* stack_pointer = nullptr;

  void start(char* bottom, size_t bytes) {
    void** top = reinterpret_cast<void**>(bottom + bytes) - 2;  // the address `ret` pops leaves the stack 16-aligned
    *--top = reinterpret_cast<void*>(&emulator_start);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer = top;
  }
  void switch_to(Context& to) { emulator_switch(&stack_pointer, to.stack_pointer); }
};

// ------------------------------------------------------------------------------------------------------------- state

enum class Wait : unsigned char { kNone, kBarrier, kWarp, kExited };

struct Fiber : Thread {
  Context context;
  void* fake_stack = nullptr;  // AddressSanitizer's
  char* stack = nullptr;
  unsigned index = 0;  // thread number in the CTA

  Wait wait = Wait::kNone;
  int barrier = 0;
  int barrier_count = 0;
  unsigned mask = 0;
  Complete complete = nullptr;
  void* operand = nullptr;
  const char* what = "";
  Place place;

  struct Copy {
    void* destination;
    void* pc;  // of the issue
    unsigned bytes;
    unsigned group;
    alignas(16) unsigned char data[16];
  };
  std::vector<Copy> copies;
  unsigned committed = 0;  // groups of cp.async committed so far
};

struct Warp {
  unsigned exists = 0;      // lanes that the CTA has
  unsigned exited = 0;
  unsigned at_barrier = 0;  // lanes waiting at a CTA or named barrier
  unsigned at_warp = 0;     // lanes waiting at a warp collective
};

struct Barrier {
  unsigned arrived = 0;
  unsigned expected = 0;
  unsigned trues = 0;
  unsigned last_trues = 0;  // of the round that ended last
  std::vector<Fiber*> waiting;
  Place place;  // of the first to arrive
  Races::Knowledge gathered;
};

struct Report {
  char* text;
  size_t size;
  size_t used = 0;

  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int written = vsnprintf(text + used, size - used, format, arguments);
    va_end(arguments);
    used = std::min(size - 1, used + static_cast<size_t>(std::max(written, 0)));
  }
};

struct Launch {
  void (*entry)(const void*);
  const void* params;
  dim3 grid, block;
  size_t shared_bytes;
  uint64_t seed;
  bool finds_races;
  size_t tls_module, tls_bytes;  // where each thread has the kernel's static shared memory
  unsigned cta_count;

  std::atomic<unsigned> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::condition_variable finished;
  unsigned running = 0;
  Report report;
  void* faulting_address = nullptr;
};

struct Worker {
  Launch* launch = nullptr;
  Context context;
  void* fake_stack = nullptr;
  const void* own_stack = nullptr;  // of the OS thread, learned at the first switch back
  size_t own_stack_bytes = 0;
  sigjmp_buf recover;

  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[kBarriers];
  char* stacks = nullptr;
  size_t stack_bytes = 0, stack_count = 0;
  char* shared_pages = nullptr;
  size_t shared_capacity = 0;
  char* shared = nullptr;
  size_t shared_slack = 0;

  std::vector<Fiber*> ready;  // a ring: first come, first served, unless shuffled
  size_t ready_first = 0, ready_count = 0;
  unsigned live = 0;
  unsigned idle_yields = 0;  // since something last happened
  bool aborted = false;
  Races races;
  std::map<const void*, Races::Knowledge> atomics;  // what the users of an atomic variable know
  uint64_t random = 0;
  enum class Order { kFirst, kLast, kRandom } order = Order::kFirst;
  std::unique_ptr<char[]> signal_stack;

  ~Worker();
  void run();
  void run_cta(unsigned number);
  void prepare_memory();
  void push(Fiber* fiber);
  void push_behind(Fiber* fiber);
  Fiber* pop();
  void resume_next(Fiber& from);
  void finish_switch(Fiber* arrived);
  void release(Barrier& barrier);
  [[noreturn]] void abort_cta(Fiber* from);
};

thread_local Worker* worker = nullptr;

Fiber& self() { return *static_cast<Fiber*>(current); }

// ------------------------------------------------------------------------------------------------------------ reports

const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

void add_place(Report& report, const char* what, const Place& place) {
  report.add("%s at %s:%u", what, base_name(place.file_name()), place.line());
}

void add_threads(Report& report, const Fiber& fiber) {
  report.add("thread %u (warp %u, lane %u) of CTA (%u, %u, %u)", fiber.index, fiber.warp, fiber.lane, fiber.block_idx.x,
             fiber.block_idx.y, fiber.block_idx.z);
}

// A frame is "  frame <object> <offset of a return address>"; the Python side turns it into function, file and line.
void add_frame(Report& report, void* pc) {
  Dl_info info;
  if (!dladdr(pc, &info) || !info.dli_fname) return;
  report.add("\n  frame %s %zx", info.dli_fname, static_cast<size_t>(static_cast<char*>(pc) - static_cast<char*>(info.dli_fbase)));
}

// The stack of calls. `interrupted` is where a signal came, if one did: what is above it on the stack is the handler's.
void add_frames(Report& report, void* interrupted = nullptr) {
  void* frames[64];
  const int count = backtrace(frames, 64);
  int first = 0;
  if (interrupted) {
    while (first < count && frames[first] != interrupted) ++first;
    if (first == count) first = 0;
  }
  for (int i = first; i < count; ++i) add_frame(report, static_cast<char*>(frames[i]) + (frames[i] == interrupted));
}

// Opens the report for the first failure of the launch; later ones are dropped.
bool claim_report() {
  return !worker->launch->failed.exchange(true);
}

void add_waiting(Report& report) {
  // Threads that wait at one place are named together, in the order of the first of each.
  struct Entry { std::string where; std::vector<unsigned> threads; };
  std::vector<Entry> entries;
  for (const Fiber& fiber : worker->fibers) {
    std::string where;
    if (fiber.wait == Wait::kExited) {
      where = "exited";
    } else if (fiber.wait == Wait::kNone) {
      where = "did not wait";
    } else {
      char text[256];
      Report line{text, sizeof text};
      line.add("waited in ");
      add_place(line, fiber.what, fiber.place);
      if (fiber.wait == Wait::kWarp) line.add(" for lanes 0x%08x", fiber.mask);
      if (fiber.wait == Wait::kBarrier && fiber.barrier) {
        line.add(" at barrier %d, %u of %d arrived", fiber.barrier, worker->barriers[fiber.barrier].arrived,
                 fiber.barrier_count);
      }
      where = text;
    }
    auto entry = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.where == where; });
    if (entry == entries.end()) entry = entries.insert(entries.end(), Entry{where, {}});
    entry->threads.push_back(fiber.index);
  }
  for (const Entry& entry : entries) {
    report.add("\n  %zu threads %s:", entry.threads.size(), entry.where.c_str());
    for (size_t i = 0; i < entry.threads.size();) {
      size_t j = i;
      while (j + 1 < entry.threads.size() && entry.threads[j + 1] == entry.threads[j] + 1) ++j;
      report.add(j > i ? " %u-%u" : " %u", entry.threads[i], entry.threads[j]);
      i = j + 1;
    }
  }
}

[[noreturn]] void fail_here(const std::string& reason, bool with_waiting = false, void* pc = nullptr, void* other_pc = nullptr) {
  if (claim_report()) {
    Report& report = worker->launch->report;
    report.add("%s\n  in ", reason.c_str());
    add_threads(report, self());
    if (pc) add_frame(report, pc);
    if (!pc) add_frames(report);
    if (with_waiting) add_waiting(report);
    if (other_pc) {
      report.add("\n  the other access:");
      add_frame(report, other_pc);
    }
  }
  worker->abort_cta(&self());
}

std::string describe(const char* what, const Place& place) {
  return std::string(what) + " at " + base_name(place.file_name()) + ":" + std::to_string(place.line());
}

// ---------------------------------------------------------------------------------------------------------- scheduling

void Worker::push(Fiber* fiber) {
  ready[(ready_first + ready_count) % ready.size()] = fiber;
  ++ready_count;
}

// The turn of this fiber comes after that of all others.
void Worker::push_behind(Fiber* fiber) {
  if (order != Order::kLast) return push(fiber);
  ready_first = (ready_first + ready.size() - 1) % ready.size();
  ready[ready_first] = fiber;
  ++ready_count;
}

Fiber* Worker::pop() {
  const size_t size = ready.size();
  size_t taken = ready_first;
  if (order == Order::kLast) {
    taken = (ready_first + ready_count - 1) % size;
  } else if (order == Order::kRandom) {
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    taken = (ready_first + random % ready_count) % size;
  }
  Fiber* fiber = ready[taken];
  if (order == Order::kFirst) {
    ready_first = (ready_first + 1) % size;
  } else {
    ready[taken] = ready[(ready_first + ready_count - 1) % size];
  }
  --ready_count;
  return fiber;
}

void Worker::finish_switch(Fiber* arrived) {
  if (__sanitizer_finish_switch_fiber) {
    void* fake = arrived ? arrived->fake_stack : fake_stack;
    // A fiber's first switch comes from whoever ran before; only the worker's own stack has to be learned.
    const void* bottom = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(fake, &bottom, &bytes);
    if (!own_stack) own_stack = bottom, own_stack_bytes = bytes;  // the first switch of all leaves the worker
  }
}

// Leaves a fiber that waits or has exited.
void Worker::resume_next(Fiber& from) {
  if (ready_count) {
    Fiber* to = pop();
    if (to == &from) return;
    current = to;
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&from.fake_stack, to->stack, stack_bytes);
    from.context.switch_to(to->context);
    finish_switch(&from);
    return;
  }
  if (live) {
    if (claim_report()) {
      launch->report.add("deadlock: every thread that has not exited waits\n  in CTA (%u, %u, %u)", from.block_idx.x,
                         from.block_idx.y, from.block_idx.z);
      add_waiting(launch->report);
    }
    abort_cta(&from);
  }
  abort_cta(&from);  // nothing is left: an ordinary end
}

void Worker::abort_cta(Fiber* from) {
  aborted = live != 0;
  current = nullptr;
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&from->fake_stack, own_stack, own_stack_bytes);
  from->context.switch_to(context);
  __builtin_unreachable();
}

extern "C" __attribute__((used, visibility("hidden"))) void emulator_fiber_main() {
  Fiber& fiber = self();
  worker->finish_switch(&fiber);
  worker->launch->entry(worker->launch->params);
  Warp& warp = worker->warps[fiber.warp];
  const unsigned bit = 1u << fiber.lane;
  if (warp.at_warp) {
    for (unsigned lanes = warp.at_warp; lanes; lanes &= lanes - 1) {
      const Fiber& other = worker->fibers[fiber.warp * kWarpSize + __builtin_ctz(lanes)];
      if (other.mask & bit) {
        fail_here("thread exited while lane " + std::to_string(other.lane) + " of its warp waits for it in " +
                  describe(other.what, other.place));
      }
    }
  }
  if (const Barrier& barrier = worker->barriers[0]; barrier.arrived && barrier.expected == worker->fibers.size()) {
    fail_here("thread exited while others wait for it in " + describe(barrier.waiting.front()->what, barrier.place), true);
  }
  fiber.wait = Wait::kExited;
  warp.exited |= bit;
  worker->live -= 1;
  worker->idle_yields = 0;
  worker->resume_next(fiber);
  __builtin_unreachable();
}

// ------------------------------------------------------------------------------------------------------------ barriers

void check_convergence(Fiber& fiber, Warp& warp, const char* what, int barrier, const Place& place) {
  if (!warp.at_barrier) return;
  const Fiber& other = worker->fibers[fiber.warp * kWarpSize + __builtin_ctz(warp.at_barrier)];
  if (other.barrier != barrier || other.place.line() != place.line() ||
      strcmp(other.place.file_name(), place.file_name()) != 0) {
    fail_here("divergent barrier: lane " + std::to_string(fiber.lane) + " arrives at " + describe(what, place) +
                  ", lane " + std::to_string(other.lane) + " of its warp waits at " + describe(other.what, other.place),
              true);
  }
}

void Worker::release(Barrier& barrier) {
  if (races.on) {
    if (barrier.waiting.size() == fibers.size()) {
      races.everyone_meets();
    } else {
      for (const Fiber* fiber : barrier.waiting) races.acquire(fiber->warp, barrier.gathered);
    }
    barrier.gathered = {};
  }
  barrier.last_trues = barrier.trues;
  barrier.arrived = barrier.trues = 0;
  for (Fiber* fiber : barrier.waiting) {
    fiber->wait = Wait::kNone;
    warps[fiber->warp].at_barrier &= ~(1u << fiber->lane);
    if (fiber != current) push(fiber);
  }
  barrier.waiting.clear();
  idle_yields = 0;
}

void barrier_arrive(int id, unsigned count, bool predicate, bool waits, const char* what, const Place& place) {
  Fiber& fiber = self();
  Warp& warp = worker->warps[fiber.warp];
  if (id < 0 || id >= kBarriers) fail_here("barrier " + std::to_string(id) + " of 16, in " + describe(what, place));
  const bool whole = count == 0;
  if (whole) count = static_cast<unsigned>(worker->fibers.size());
  if (!whole && (count % kWarpSize || count > round_up(worker->fibers.size(), kWarpSize))) {
    fail_here("barrier count " + std::to_string(count) + " is no number of whole warps of this CTA, in " +
              describe(what, place));
  }
  check_convergence(fiber, warp, what, id, place);
  Barrier& barrier = worker->barriers[id];
  if (barrier.arrived == 0) {
    barrier.place = place;
    barrier.expected = count;
  } else if (barrier.expected != count) {
    fail_here("barrier " + std::to_string(id) + " is waited for by " + std::to_string(barrier.expected) + " threads in " +
              describe(what, barrier.place) + ", by " + std::to_string(count) + " in " + describe(what, place));
  } else if (id == 0 && whole &&
             (barrier.place.line() != place.line() || strcmp(barrier.place.file_name(), place.file_name()) != 0)) {
    fail_here("divergent barrier: this thread arrives at " + describe(what, place) + ", others wait at " +
                  describe(what, barrier.place),
              true);
  }
  if (whole && worker->live != worker->fibers.size()) {
    fail_here("barrier after some threads exited: " + describe(what, place), true);
  }
  fiber.what = what;
  fiber.place = place;
  fiber.barrier = id;
  fiber.barrier_count = static_cast<int>(count);
  barrier.arrived += 1;
  barrier.trues += predicate;
  if (worker->races.on) worker->races.release(fiber.warp, barrier.gathered);
  if (waits) {
    fiber.wait = Wait::kBarrier;
    warp.at_barrier |= 1u << fiber.lane;
    barrier.waiting.push_back(&fiber);
  }
  if (barrier.arrived == barrier.expected) {
    worker->release(barrier);
  } else if (waits) {
    worker->resume_next(fiber);
  }
}

const char* verb(Access access) {
  return access == Access::kRead ? "reads" : access == Access::kWrite ? "writes" : "updates";
}

// An access to memory: to shared memory, it may race. `pc` is where, and need not be on the stack.
inline void note_access(const void* address, size_t bytes, Access access, void* pc) {
  if (!current || !worker->races.on) return;
  const Fiber& fiber = self();
  const PastAccess* other = worker->races.access(fiber.warp, fiber.lane, address, bytes, access, pc);
  if (!other) return;
  char text[256];
  const ptrdiff_t offset = static_cast<const char*>(address) - worker->shared;
  const bool is_dynamic = offset >= 0 && offset < static_cast<ptrdiff_t>(worker->launch->shared_bytes);
  snprintf(text, sizeof text, "race in %s shared memory%s%s: this thread %s %zu bytes that warp %u, lane %d %s with no barrier in between",
           is_dynamic ? "dynamic" : "static", is_dynamic ? " at byte " : "",
           is_dynamic ? std::to_string(offset).c_str() : "", verb(access), bytes, other->warp,
           31 - __builtin_clz(other->lanes), verb(other->access));
  fail_here(text, false, pc, other->pc);
}

void note_atomic(void* address, size_t bytes, void* pc) {
  note_access(address, bytes, Access::kAtomic, pc);
  if (current) passes_on(address);
}

}  // namespace

int cta_barrier(bool predicate, const char* what, const Place& place) {
  barrier_arrive(0, 0, predicate, true, what, place);
  return static_cast<int>(worker->barriers[0].last_trues);
}

void named_barrier_sync(int id, int count, const Place& place) {
  barrier_arrive(id, static_cast<unsigned>(count), false, true, "bar.sync", place);
}

bool named_barrier_any(int id, int count, bool predicate, const Place& place) {
  barrier_arrive(id, static_cast<unsigned>(count), predicate, true, "barrier.red.or", place);
  return worker->barriers[id].last_trues != 0;
}

void named_barrier_arrive(int id, int count, const Place& place) {
  barrier_arrive(id, static_cast<unsigned>(count), false, false, "bar.arrive", place);
}

void passes_on(const void* object) {
  if (!worker->races.on) return;
  Races::Knowledge& gathered = worker->atomics[object];
  worker->races.release(self().warp, gathered);
  worker->races.acquire(self().warp, gathered);
}

void warp_collective(unsigned mask, Complete complete, void* operand, const char* what, const Place& place) {
  Fiber& fiber = self();
  Warp& warp = worker->warps[fiber.warp];
  const unsigned bit = 1u << fiber.lane;
  Fiber* lanes = &worker->fibers[fiber.warp * kWarpSize];
  mask &= warp.exists;
  if (!(mask & bit)) fail_here("lane " + std::to_string(fiber.lane) + " is not in its own mask: " + describe(what, place));
  if (mask & warp.exited) {
    fail_here("lane " + std::to_string(__builtin_ctz(mask & warp.exited)) + " is in the mask and has exited: " +
                  describe(what, place),
              true);
  }
  if (mask & warp.at_barrier) {
    const Fiber& other = lanes[__builtin_ctz(mask & warp.at_barrier)];
    fail_here("divergent warp: this lane arrives at " + describe(what, place) + ", lane " + std::to_string(other.lane) +
                  " waits at " + describe(other.what, other.place),
              true);
  }
  if (const unsigned others = warp.at_warp & mask) {
    const Fiber& other = lanes[__builtin_ctz(others)];
    if (other.mask != mask || other.complete != complete || other.place.line() != place.line() ||
        strcmp(other.place.file_name(), place.file_name()) != 0) {
      char masks[64];
      snprintf(masks, sizeof masks, " (masks 0x%08x and 0x%08x)", mask, other.mask);
      fail_here("divergent warp: this lane arrives at " + describe(what, place) + ", lane " +
                    std::to_string(other.lane) + " waits at " + describe(other.what, other.place) + masks,
                true);
    }
  }
  fiber.mask = mask;
  fiber.complete = complete;
  fiber.operand = operand;
  fiber.what = what;
  fiber.place = place;
  warp.at_warp |= bit;
  if ((warp.at_warp & mask) != mask) {
    fiber.wait = Wait::kWarp;
    worker->resume_next(fiber);
    return;
  }
  void* operands[kWarpSize];
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    operands[lane] = lanes[lane].operand;
  }
  if (complete) {
    complete(operands, mask);
  } else if (worker->races.on) {
    worker->races.lanes_meet(fiber.warp, mask, warp.exists);
  }
  warp.at_warp &= ~mask;
  for (unsigned rest = mask & ~bit; rest; rest &= rest - 1) {
    Fiber& other = lanes[__builtin_ctz(rest)];
    other.wait = Wait::kNone;
    worker->push(&other);
  }
  worker->idle_yields = 0;
}

void yield(const Place& place) {
  Fiber& fiber = self();
  // Every thread has looked a hundred times and nobody wrote, arrived or exited.
  if (++worker->idle_yields > 100 * worker->live + 1000) {
    fail_here("deadlock: threads only wait for a value that nobody writes, " + describe("polled", place), true);
  }
  worker->push_behind(&fiber);
  worker->resume_next(fiber);
}

void fail(const char* reason, const Place& place) { fail_here(describe(reason, place)); }

void async_copy(void* destination, const void* data, unsigned bytes) {
  Fiber& fiber = self();
  note_access(destination, bytes, Access::kWrite, __builtin_return_address(0));
  Fiber::Copy copy{destination, __builtin_return_address(0), bytes, fiber.committed, {}};
  memcpy(copy.data, data, bytes);
  memset(destination, kPoison, bytes);
  fiber.copies.push_back(copy);
}

void async_commit() { self().committed += 1; }

void async_wait(unsigned newest_groups_left_running) {
  Fiber& fiber = self();
  // Others may see the poison first.
  if (worker->order != Worker::Order::kFirst && !fiber.copies.empty()) {
    worker->push_behind(&fiber);
    worker->resume_next(fiber);
  }
  size_t done = 0;
  while (done < fiber.copies.size() && fiber.copies[done].group + newest_groups_left_running < fiber.committed) {
    const Fiber::Copy& copy = fiber.copies[done++];
    note_access(copy.destination, copy.bytes, Access::kWrite, copy.pc);
    memcpy(copy.destination, copy.data, copy.bytes);
  }
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + static_cast<ptrdiff_t>(done));
}

// ------------------------------------------------------------------------------------------------------------- workers

namespace {

char* map_pages(size_t bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(pages);
}

Worker::~Worker() {
  if (stacks) munmap(stacks, stack_count * stack_bytes);
  if (shared_pages) munmap(shared_pages, shared_capacity + 2 * page_bytes);
}

void Worker::prepare_memory() {
  const size_t threads = size_t{launch->block.x} * launch->block.y * launch->block.z;
  // The sanitizer's frames are several times as large.
  const size_t wanted = round_up(__asan_unpoison_memory_region ? size_t{1} << 20 : size_t{1} << 18, page_bytes);
  if (stack_count < threads) {
    if (stacks) munmap(stacks, stack_count * stack_bytes);
    stack_bytes = wanted;
    stack_count = threads;
    stacks = map_pages(stack_count * stack_bytes);
    for (size_t i = 0; i < stack_count; ++i) mprotect(stacks + i * stack_bytes, page_bytes, PROT_NONE);
  }
  fibers.clear();
  fibers.resize(threads);
  warps.assign(round_up(threads, kWarpSize) / kWarpSize, Warp{});
  ready.assign(threads + 1, nullptr);

  // Dynamic shared memory ends at a page that nobody may touch, as far as its alignment allows.
  if (!shared_pages || shared_capacity < launch->shared_bytes) {
    if (shared_pages) munmap(shared_pages, shared_capacity + 2 * page_bytes);
    shared_capacity = round_up(std::max<size_t>(launch->shared_bytes, 1), page_bytes);
    shared_pages = map_pages(shared_capacity + 2 * page_bytes);
    mprotect(shared_pages, page_bytes, PROT_NONE);
    mprotect(shared_pages + page_bytes + shared_capacity, page_bytes, PROT_NONE);
  }
  char* end = shared_pages + page_bytes + shared_capacity;
  size_t alignment = kSharedAlignment;  // the largest that keeps the end exact, but at least what vectors need
  while (alignment > 16 && launch->shared_bytes % alignment) alignment /= 2;
  shared = end - round_up(launch->shared_bytes, alignment);
  shared_slack = static_cast<size_t>(end - shared) - launch->shared_bytes;
}

void Worker::run_cta(unsigned number) {
  const dim3 grid = launch->grid, block = launch->block;
  if (launch->seed & 1) number = launch->cta_count - 1 - number;
  const uint3 block_idx{number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};

  memset(shared, kPoison, launch->shared_bytes + shared_slack);
  if (__asan_poison_memory_region && shared_slack) {
    __asan_poison_memory_region(shared + launch->shared_bytes, shared_slack);
  }
  char* fixed = nullptr;
  if (launch->tls_module) {
    size_t index[2] = {launch->tls_module, 0};
    fixed = static_cast<char*>(__tls_get_addr(index));
    memset(fixed, kPoison, launch->tls_bytes);
  }
  races.on = launch->finds_races;
  if (races.on) {
    races.start(static_cast<unsigned>(warps.size()), shared, launch->shared_bytes, fixed, launch->tls_bytes);
    atomics.clear();
  }

  order = launch->seed == 0 ? Order::kFirst : launch->seed == 1 ? Order::kLast : Order::kRandom;
  random = (launch->seed * 0x9e3779b97f4a7c15u) ^ (uint64_t{number} + 1) * 0xbf58476d1ce4e5b9u;
  if (!random) random = 1;
  ready_first = ready_count = 0;
  idle_yields = 0;
  live = static_cast<unsigned>(fibers.size());
  for (Warp& warp : warps) warp = Warp{};
  for (Barrier& barrier : barriers) barrier = Barrier{};
  for (unsigned i = 0; i < fibers.size(); ++i) {
    Fiber& fiber = fibers[i];
    fiber.index = i;
    fiber.thread_idx = {i % block.x, i / block.x % block.y, i / block.x / block.y};
    fiber.lane = i % kWarpSize;
    fiber.warp = i / kWarpSize;
    fiber.block_idx = block_idx;
    fiber.block_dim = block;
    fiber.grid_dim = grid;
    fiber.shared = shared;
    fiber.shared_bytes = static_cast<unsigned>(launch->shared_bytes);
    fiber.wait = Wait::kNone;
    fiber.copies.clear();
    fiber.committed = 0;
    fiber.fake_stack = nullptr;
    fiber.stack = stacks + i * stack_bytes;
    fiber.context.start(fiber.stack, stack_bytes);
    warps[fiber.warp].exists |= 1u << fiber.lane;
    push(&fiber);
  }

  aborted = false;
  if (sigsetjmp(recover, 0) == 0) {
    Fiber* first = pop();
    current = first;
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&fake_stack, first->stack, stack_bytes);
    context.switch_to(first->context);
    finish_switch(nullptr);
  } else {
    aborted = true;  // a signal handler left the fiber it interrupted
    current = nullptr;
    if (__sanitizer_start_switch_fiber) {
      __sanitizer_start_switch_fiber(nullptr, own_stack, own_stack_bytes);
      __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
    }
  }
  if (aborted && __asan_unpoison_memory_region) {
    for (Fiber& fiber : fibers) __asan_unpoison_memory_region(fiber.stack + page_bytes, stack_bytes - page_bytes);
  }
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(shared, launch->shared_bytes + shared_slack);
  for (size_t i = 0; !aborted && i < shared_slack; ++i) {
    if (static_cast<unsigned char>(shared[launch->shared_bytes + i]) != kPoison) {
      if (claim_report()) {
        launch->report.add("write past the end of dynamic shared memory: byte %zu of %zu\n  in CTA (%u, %u, %u)",
                           launch->shared_bytes + i, launch->shared_bytes, block_idx.x, block_idx.y, block_idx.z);
      }
      break;
    }
  }
}

void Worker::run() {
  worker = this;
  if (!signal_stack) signal_stack = std::make_unique<char[]>(size_t{1} << 16);
  stack_t alternate{.ss_sp = signal_stack.get(), .ss_flags = 0, .ss_size = size_t{1} << 16}, previous;
  sigaltstack(&alternate, &previous);
  own_stack = nullptr;
  while (!launch->failed) {
    const unsigned number = launch->next.fetch_add(1);
    if (number >= launch->cta_count) break;
    run_cta(number);
  }
  previous.ss_flags = previous.ss_sp ? 0 : SS_DISABLE;
  sigaltstack(&previous, nullptr);
  worker = nullptr;
}

// ------------------------------------------------------------------------------------------------------------- signals

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGUSR1};
struct sigaction previous_actions[std::size(kSignals)];

void on_signal(int signal, siginfo_t* info, void* context) {
  if (!worker || !current) {  // not ours
    for (size_t i = 0; i < std::size(kSignals); ++i) {
      if (kSignals[i] != signal) continue;
      const struct sigaction& before = previous_actions[i];
      if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(signal, info, context);
      } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(signal);
      } else if (signal != SIGUSR1) {
        sigaction(signal, &before, nullptr);
        raise(signal);
      }
    }
    return;
  }
  if (claim_report()) {
    Report& report = worker->launch->report;
    const greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    switch (signal) {
      case SIGSEGV:
      case SIGBUS: {
        if (info->si_code == SI_KERNEL) {  // a general protection fault comes without an address
          report.add("misaligned vector access, or an address that cannot exist");
          break;
        }
        const bool writes = registers[REG_ERR] & 2;
        report.add("invalid %s at address %p", writes ? "write" : "read", info->si_addr);
        worker->launch->faulting_address = info->si_addr;
        const char* address = static_cast<char*>(info->si_addr);
        const ptrdiff_t past = address - worker->shared - static_cast<ptrdiff_t>(worker->launch->shared_bytes);
        if (past >= 0 && past < static_cast<ptrdiff_t>(page_bytes)) {
          report.add(", %td bytes past the end of the CTA's %zu bytes of dynamic shared memory", past,
                     worker->launch->shared_bytes);
        }
        break;
      }
      case SIGFPE: report.add("integer division by zero"); break;
      case SIGUSR1: report.add("still running after the time limit"); break;
      case SIGABRT: report.add("abort, as by a failed assertion"); break;
      default: report.add("trap"); break;
    }
    report.add("\n  in ");
    add_threads(report, self());
    add_frames(report, reinterpret_cast<void*>(registers[REG_RIP]));
  }
  siglongjmp(worker->recover, 1);
}

std::mutex launch_mutex;  // one launch at a time: the signal handlers are the process's
std::vector<std::unique_ptr<Worker>> idle_workers;

}  // namespace

// ----------------------------------------------------------------------------------------------------------------- API

extern "C" {

struct EmulatorLaunch {
  void* entry;
  const void* params;
  uint32_t grid[3], block[3];
  uint64_t shared_bytes;
  uint64_t seed;
  uint32_t workers;
  uint32_t finds_races;  // only in kernels compiled with -fsanitize=thread
  double seconds;                // time limit
};

// Returns 0, or 1 with a report in `text` and, after a bad access, its address.
EMULATOR_API int emulator_launch(const EmulatorLaunch* request, char* text, uint64_t size, void** address) {
  const std::lock_guard<std::mutex> one_at_a_time(launch_mutex);
  Launch launch{};
  launch.entry = reinterpret_cast<void (*)(const void*)>(request->entry);
  launch.params = request->params;
  launch.grid = {request->grid[0], request->grid[1], request->grid[2]};
  launch.block = {request->block[0], request->block[1], request->block[2]};
  launch.shared_bytes = request->shared_bytes;
  launch.seed = request->seed;
  launch.finds_races = request->finds_races;
  launch.cta_count = launch.grid.x * launch.grid.y * launch.grid.z;
  launch.report = {text, size};
  text[0] = 0;

  // The module whose thread-local storage is the kernel's static shared memory: the one that holds its entry.
  struct Find { void* entry; size_t module, bytes; } find{request->entry, 0, 0};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        Find& wanted = *static_cast<Find*>(data);
        bool holds_entry = false;
        size_t tls = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const ElfW(Phdr)& header = info->dlpi_phdr[i];
          const uintptr_t start = info->dlpi_addr + header.p_vaddr;
          const uintptr_t entry = reinterpret_cast<uintptr_t>(wanted.entry);
          if (header.p_type == PT_LOAD && entry >= start && entry < start + header.p_memsz) holds_entry = true;
          if (header.p_type == PT_TLS) tls = header.p_memsz;
        }
        if (!holds_entry) return 0;
        wanted.bytes = tls;
        wanted.module = tls ? info->dlpi_tls_modid : 0;
        return 1;
      },
      &find);
  launch.tls_module = find.module;
  launch.tls_bytes = find.bytes;

  void* warm_up[1];
  backtrace(warm_up, 1);  // loads the unwinder now, not in a signal handler
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &previous_actions[i]);

  const unsigned count = std::max(1u, std::min(request->workers, launch.cta_count));
  while (idle_workers.size() < count) idle_workers.push_back(std::make_unique<Worker>());
  std::vector<std::thread> threads;
  launch.running = count;
  for (unsigned i = 0; i < count; ++i) {
    Worker* w = idle_workers[i].get();
    w->launch = &launch;
    threads.emplace_back([w, &launch] {
      w->prepare_memory();
      w->run();
      const std::lock_guard<std::mutex> lock(launch.mutex);
      launch.running -= 1;
      launch.finished.notify_one();
    });
  }
  {
    std::unique_lock<std::mutex> lock(launch.mutex);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(request->seconds);
    const auto done = [&] { return launch.running == 0; };
    if (!launch.finished.wait_until(lock, std::chrono::time_point_cast<std::chrono::steady_clock::duration>(limit), done)) {
      while (!done()) {
        for (std::thread& thread : threads) pthread_kill(thread.native_handle(), SIGUSR1);
        launch.finished.wait_for(lock, std::chrono::milliseconds(50), done);
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &previous_actions[i], nullptr);
  *address = launch.faulting_address;
  return launch.failed ? 1 : 0;
}

// What code compiled with -fsanitize=thread calls.
#define EMULATOR_ACCESS(bytes)                                                                                        \
  EMULATOR_API void __tsan_read##bytes(void* a) { note_access(a, bytes, Access::kRead, __builtin_return_address(0)); }   \
  EMULATOR_API void __tsan_write##bytes(void* a) { note_access(a, bytes, Access::kWrite, __builtin_return_address(0)); } \
  EMULATOR_API void __tsan_unaligned_read##bytes(void* a) {                                                           \
    note_access(a, bytes, Access::kRead, __builtin_return_address(0));                                                \
  }                                                                                                                   \
  EMULATOR_API void __tsan_unaligned_write##bytes(void* a) {                                                          \
    note_access(a, bytes, Access::kWrite, __builtin_return_address(0));                                               \
  }
EMULATOR_ACCESS(1)
EMULATOR_ACCESS(2)
EMULATOR_ACCESS(4)
EMULATOR_ACCESS(8)
EMULATOR_ACCESS(16)
#undef EMULATOR_ACCESS
EMULATOR_API void __tsan_read_range(void* a, size_t n) { note_access(a, n, Access::kRead, __builtin_return_address(0)); }
EMULATOR_API void __tsan_write_range(void* a, size_t n) { note_access(a, n, Access::kWrite, __builtin_return_address(0)); }
EMULATOR_API void __tsan_init() {}
EMULATOR_API void __tsan_func_entry(void*) {}
EMULATOR_API void __tsan_func_exit() {}
EMULATOR_API void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// An atomic orders what its users did: it is taken to release and to acquire, as with a fence on either side.
#define EMULATOR_ATOMIC(bits)                                                                                         \
  EMULATOR_API uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* a, int) {                     \
    note_atomic(const_cast<uint##bits##_t*>(a), bits / 8, __builtin_return_address(0));                               \
    return __atomic_load_n(a, __ATOMIC_SEQ_CST);                                                                      \
  }                                                                                                                   \
  EMULATOR_API bool __tsan_atomic##bits##_compare_exchange_strong(volatile uint##bits##_t* a, uint##bits##_t* expected, \
                                                                  uint##bits##_t desired, int, int) {                 \
    note_atomic(const_cast<uint##bits##_t*>(a), bits / 8, __builtin_return_address(0));                               \
    return __atomic_compare_exchange_n(a, expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);              \
  }
EMULATOR_ATOMIC(16)
EMULATOR_ATOMIC(32)
EMULATOR_ATOMIC(64)
#undef EMULATOR_ATOMIC

}  // extern "C"

}  // namespace emulator
