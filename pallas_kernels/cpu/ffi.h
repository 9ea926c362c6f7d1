// What the handlers of XLA's foreign function interface need: buffers, errors, and XLA's own threads.
#pragma once
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"
#include "xla/ffi/api/c_api.h"

static inline XLA_FFI_Buffer* argument(XLA_FFI_CallFrame* frame, int i) { return frame->args.args[i]; }
static inline XLA_FFI_Buffer* result(XLA_FFI_CallFrame* frame, int i) { return frame->rets.rets[i]; }
static inline int64_t number(XLA_FFI_CallFrame* frame, int i) { return *(const int32_t*)argument(frame, i)->data; }

static inline enum Kind kind_of(const XLA_FFI_Buffer* buffer) {
  return buffer->dtype == XLA_FFI_DataType_F32 ? FLOAT32 : buffer->dtype == XLA_FFI_DataType_BF16 ? BFLOAT16 : INT8;
}

// XLA asks a handler once for the version of the interface that it was compiled for.
static inline int answers_metadata(XLA_FFI_CallFrame* frame) {
  XLA_FFI_InternalExtension* extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)extension)->metadata;
  metadata->api_version =
      (XLA_FFI_Api_Version){sizeof(XLA_FFI_Api_Version), 0, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  metadata->traits = 0;
  return 1;
}

static inline XLA_FFI_Error* failure(XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args = {sizeof args, 0, message, code};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Work in `count` parts, shared by the caller and the threads of XLA's pool. Whoever drops the last reference frees it.
typedef void Work(const void* arguments, int64_t part);
typedef struct {
  atomic_int references;
  atomic_long next, done;
  int64_t count;
  Work* work;
  const void* arguments;
} Job;

static inline void do_parts(Job* job) {
  for (int64_t part; (part = atomic_fetch_add(&job->next, 1)) < job->count; atomic_fetch_add(&job->done, 1))
    job->work(job->arguments, part);
}

static inline void leave_job(Job* job) {
  if (atomic_fetch_sub(&job->references, 1) == 1) free(job);
}

static inline void help(void* job) {
  do_parts(job);
  leave_job(job);
}

static inline void relax(int spins) {
  if (spins >= 4000) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Does all parts, and returns when they are done. It waits only for parts that a thread has begun, so a pool whose
// threads are all busy cannot block it. Without memory for the job the caller does all parts itself.
static inline void in_parallel(XLA_FFI_CallFrame* frame, int64_t count, Work* work, const void* arguments) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args pool = {sizeof pool, 0, frame->ctx, &threads};
  XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_NumThreads(&pool);
  if (error) {
    XLA_FFI_Error_Destroy_Args destroyed = {sizeof destroyed, 0, error};
    frame->api->XLA_FFI_Error_Destroy(&destroyed);
    threads = 1;
  }
  int64_t helpers = (threads < count ? threads : count) - 1;
  Job* job = helpers > 0 ? malloc(sizeof *job) : NULL;
  if (!job) {
    for (int64_t part = 0; part < count; part++) work(arguments, part);
    return;
  }
  atomic_init(&job->references, (int)helpers + 1);
  atomic_init(&job->next, 0);
  atomic_init(&job->done, 0);
  job->count = count;
  job->work = work;
  job->arguments = arguments;
  for (int64_t i = 0; i < helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args task = {sizeof task, 0, frame->ctx, help, job};
    error = frame->api->XLA_FFI_ThreadPool_Schedule(&task);
    if (error) {
      XLA_FFI_Error_Destroy_Args destroyed = {sizeof destroyed, 0, error};
      frame->api->XLA_FFI_Error_Destroy(&destroyed);
      leave_job(job);
    }
  }
  do_parts(job);
  for (int spins = 0; atomic_load(&job->done) < count; spins++) relax(spins);
  leave_job(job);
}
