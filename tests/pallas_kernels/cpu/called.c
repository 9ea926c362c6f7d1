// Calls one of the handlers as XLA does: the name is the argument, and buffers come from the standard input. What it
// returns goes to the standard output, an error to the standard error.
//
// Input, in 64-bit numbers: the counts of arguments, results and attributes; of each argument its type, rank and
// dimensions, its size in bytes, and its bytes; of each result likewise, with the argument whose memory it has, or -1,
// in place of the bytes; of each attribute its 4 bytes and 4 more.
#include <pthread.h>

#include "ffi.h"

enum { MOST = 32, ALIGNMENT = 64 };

typedef struct {
  const char* name;
  XLA_FFI_Handler* handler;
} Handler;
#define HANDLER(name) XLA_FFI_Error* name(XLA_FFI_CallFrame*);
HANDLERS
#undef HANDLER
#define HANDLER(name) {#name, name},
static const Handler handlers[] = {HANDLERS};

static pthread_t helpers[4096];
static int num_helpers;

typedef struct {
  XLA_FFI_Task* task;
  void* data;
} Task;

static void* run_task(void* task) {
  Task own = *(Task*)task;
  free(task);
  own.task(own.data);
  return NULL;
}

static XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  Task* task = malloc(sizeof *task);
  *task = (Task){args->task, args->data};
  return pthread_create(&helpers[num_helpers++], NULL, run_task, task) ? (XLA_FFI_Error*)args : NULL;
}

static XLA_FFI_Error* num_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = 3;
  return NULL;
}

static XLA_FFI_Error* fail(XLA_FFI_Error_Create_Args* args) {
  fputs(args->message, stderr);
  exit(1);
}

static void read_bytes(void* to, size_t size) {
  if (fread(to, 1, size, stdin) != size) exit(2);
}

static int64_t read_number(void) {
  int64_t number;
  read_bytes(&number, sizeof number);
  return number;
}

static int64_t dims[2 * MOST][MOST], sizes[2 * MOST];

static XLA_FFI_Buffer read_buffer(int i) {
  XLA_FFI_Buffer buffer = {.struct_size = sizeof buffer, .dtype = (XLA_FFI_DataType)read_number(), .dims = dims[i]};
  buffer.rank = read_number();
  read_bytes(dims[i], buffer.rank * sizeof(int64_t));
  sizes[i] = read_number();
  return buffer;
}

static void* memory_of(int64_t size) { return aligned_alloc(ALIGNMENT, (size / ALIGNMENT + 1) * ALIGNMENT); }

int main(int count, char** words) {
  (void)count;
  XLA_FFI_Buffer buffers[2 * MOST];
  XLA_FFI_Scalar scalars[MOST];
  char values[MOST][sizeof(int64_t)];
  void *args[MOST], *rets[MOST], *attrs[MOST];
  int64_t num_args = read_number(), num_rets = read_number(), num_attrs = read_number();
  for (int i = 0; i < num_args; i++) {
    buffers[i] = read_buffer(i);
    buffers[i].data = memory_of(sizes[i]);
    read_bytes(buffers[i].data, sizes[i]);
    args[i] = &buffers[i];
  }
  for (int i = 0; i < num_rets; i++) {
    buffers[MOST + i] = read_buffer(MOST + i);
    int64_t of = read_number();
    buffers[MOST + i].data = of < 0 ? memory_of(sizes[MOST + i]) : buffers[of].data;
    if (of < 0) memset(buffers[MOST + i].data, 0x7f, sizes[MOST + i]);  // what XLA's memory holds is any number
    rets[i] = &buffers[MOST + i];
  }
  for (int i = 0; i < num_attrs; i++) {
    read_bytes(values[i], sizeof values[i]);
    scalars[i].value = values[i];
    attrs[i] = &scalars[i];
  }
  XLA_FFI_Api api = {
      .struct_size = sizeof api,
      .XLA_FFI_Error_Create = fail,
      .XLA_FFI_ThreadPool_Schedule = schedule,
      .XLA_FFI_ThreadPool_NumThreads = num_threads,
  };
  XLA_FFI_CallFrame frame = {
      .struct_size = sizeof frame,
      .api = &api,
      .stage = XLA_FFI_ExecutionStage_EXECUTE,
      .args = {.size = num_args, .args = args},
      .rets = {.size = num_rets, .rets = rets},
      .attrs = {.size = num_attrs, .attrs = attrs},
  };
  for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++)
    if (!strcmp(handlers[i].name, words[1])) handlers[i].handler(&frame);
  for (int i = 0; i < num_helpers; i++) pthread_join(helpers[i], NULL);
  for (int i = 0; i < num_rets; i++) fwrite(buffers[MOST + i].data, 1, sizes[MOST + i], stdout);
  return 0;
}
