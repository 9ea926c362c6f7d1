// Zeros that take no memory until they are used.
#include <sys/mman.h>
#include <unistd.h>

#include "ffi.h"

static int64_t bytes_of_value(const XLA_FFI_Buffer* buffer) {
  switch (buffer->dtype) {
    case XLA_FFI_DataType_S8: return 1;
    case XLA_FFI_DataType_BF16: return 2;
    case XLA_FFI_DataType_F32:
    case XLA_FFI_DataType_S32: return 4;
    default: return 0;
  }
}

// Linux takes the whole pages between the ends back, and gives zeros in their place when they are next touched.
static void clear(char* data, int64_t bytes) {
#if defined(__linux__)
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)data, end = from + (uintptr_t)bytes;
  uintptr_t first = (from + page - 1) / page * page, last = end / page * page;
  if (first < last && !madvise((void*)first, last - first, MADV_DONTNEED)) {
    memset(data, 0, first - from);
    memset((void*)last, 0, end - last);
    return;
  }
#endif
  memset(data, 0, (size_t)bytes);
}

// () -> zeros, any number of arrays of int8, bfloat16, float32 or int32.
XLA_FFI_Error* pallas_serve_zeros(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return NULL;
  for (int i = 0; i < frame->rets.size; i++) {
    XLA_FFI_Buffer* zeros = result(frame, i);
    int64_t bytes = bytes_of_value(zeros);
    if (!bytes) return failure(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "there are no zeros of this type");
    for (int64_t axis = 0; axis < zeros->rank; axis++) bytes *= zeros->dims[axis];
    clear(zeros->data, bytes);
  }
  return NULL;
}
