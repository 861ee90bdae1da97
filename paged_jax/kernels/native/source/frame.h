// Access to the call frame of XLA's foreign function interface: buffers, attributes, errors and the thread
// pool. It uses the C interface in jaxlib's header, because the C++ templates take two seconds to compile.
#pragma once

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

// Answers XLA's query for the version of the interface; returns whether this call is the query. XLA sends it
// once for each kernel.
inline bool answers_metadata(XLA_FFI_CallFrame* frame) {
  auto* extension = frame->extension_start;  // auto, because jaxlib 0.11 renamed the type
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return true;
}

inline XLA_FFI_Buffer* argument(XLA_FFI_CallFrame* frame, int index) {
  return (XLA_FFI_Buffer*)frame->args.args[index];
}

inline XLA_FFI_Buffer* result(XLA_FFI_CallFrame* frame, int index) {
  return (XLA_FFI_Buffer*)frame->rets.rets[index];
}

// Returns a static parameter by its name.
template <class Number>
Number attribute(XLA_FFI_CallFrame* frame, const char* name) {
  const XLA_FFI_Attrs& attrs = frame->attrs;
  for (int64_t i = 0; i < attrs.size; i++) {
    const XLA_FFI_ByteSpan* its = attrs.names[i];
    if (its->len == strlen(name) && !memcmp(its->ptr, name, its->len))
      return *(const Number*)((const XLA_FFI_Scalar*)attrs.attrs[i])->value;
  }
  return 0;
}

inline XLA_FFI_Error* error(XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args = {};
  args.struct_size = sizeof args;
  args.message = message;
  args.errc = code;
  return frame->api->XLA_FFI_Error_Create(&args);
}

inline bool succeeds(XLA_FFI_CallFrame* frame, XLA_FFI_Error* failure) {
  if (!failure) return true;
  XLA_FFI_Error_Destroy_Args args = {};
  args.struct_size = sizeof args;
  args.error = failure;
  frame->api->XLA_FFI_Error_Destroy(&args);
  return false;
}

inline int64_t num_threads(XLA_FFI_CallFrame* frame) {
  int64_t count = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {};
  args.struct_size = sizeof args;
  args.ctx = frame->ctx;
  args.num_threads = &count;
  return succeeds(frame, frame->api->XLA_FFI_ThreadPool_NumThreads(&args)) ? count : 1;
}

// A range of consecutive parts. `next` is the first part that no thread has taken.
struct Range {
  int64_t next, end;
};

// The parts of a call, which are run by the calling thread and by helper threads from the pool. Each thread
// starts with a range of parts, and then takes parts that other threads have not started. In this way, each
// thread reads memory in order, which is a fourth faster than taking parts in turn. A helper may start after
// the call has returned, so a job is reference counted and may outlive the call.
struct Job {
  void (*run)(void* call, int64_t part);
  void* call;
  int64_t num_ranges, num_started, num_done, num_references;
  Range ranges[];  // one per thread

  void take_parts() {
    int64_t first = __atomic_fetch_add(&num_started, 1, __ATOMIC_RELAXED), part;
    for (int64_t i = 0; i < num_ranges; i++) {
      Range& range = ranges[(first + i) % num_ranges];
      while ((part = __atomic_fetch_add(&range.next, 1, __ATOMIC_RELAXED)) < range.end) {
        run(call, part);
        __atomic_fetch_add(&num_done, 1, __ATOMIC_RELEASE);
      }
    }
  }

  void release() {
    if (__atomic_sub_fetch(&num_references, 1, __ATOMIC_ACQ_REL) == 0) free(this);
  }
};

inline void help(void* data) {
  Job* job = (Job*)data;
  job->take_parts();
  job->release();
}

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Runs `call.run(part)` for each part, on this thread and on idle threads of XLA's pool. It waits only for
// parts that are running, never for a helper thread to start.
template <class Call>
void in_parallel(XLA_FFI_CallFrame* frame, Call& call, int64_t num_parts) {
  int64_t helpers = num_parts > 1 ? num_threads(frame) - 1 : 0;
  if (helpers > num_parts - 1) helpers = num_parts - 1;
  int64_t num_ranges = helpers + 1;
  Job* job = helpers > 0 ? (Job*)malloc(sizeof(Job) + num_ranges * sizeof(Range)) : nullptr;
  if (!job) {
    for (int64_t part = 0; part < num_parts; part++) call.run(part);
    return;
  }
  auto run = [](void* call, int64_t part) { ((Call*)call)->run(part); };
  *job = {run, &call, num_ranges, 0, 0, num_ranges};
  for (int64_t i = 0; i < num_ranges; i++)
    job->ranges[i] = {i * num_parts / num_ranges, (i + 1) * num_parts / num_ranges};
  for (; helpers > 0; helpers--) {
    XLA_FFI_ThreadPool_Schedule_Args args = {};
    args.struct_size = sizeof args;
    args.ctx = frame->ctx;
    args.task = help;
    args.data = job;
    if (!succeeds(frame, frame->api->XLA_FFI_ThreadPool_Schedule(&args))) job->release();
  }
  job->take_parts();
  for (int turn = 0; __atomic_load_n(&job->num_done, __ATOMIC_ACQUIRE) < num_parts; turn++)
    turn < 1000 ? pause_briefly() : (void)sched_yield();
  job->release();
}

// Calls with the same number of parts, one for each group of rows, as a single list of parts.
template <class Call>
struct Grouped {
  Call* of_groups;
  int64_t parts_of_each;

  void run(int64_t part) { of_groups[part / parts_of_each].run(part % parts_of_each); }
};
