// A CUDA driver, runtime and NVML of one H100 that does nothing: kernels do not run, and what is read from the device is
// zero. cuda_stand_in.py appends the functions that only return success, or a new handle.
//
// All streams are one queue that is always empty, except for callbacks, which a thread of its own runs in their order.

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500 };
#define TOTAL_BYTES 85520809984ull
#define FREE_BYTES 84000000000ull
#define CONTEXT ((void *)0x100)
#define CUDA_VERSION 13000

// ---- numbers: handles of anything, and addresses of device memory, which nothing is behind ----

#define FIRST_ADDRESS 0x700000000000ull
#define LAST_ADDRESS 0x7a0000000000ull
#define GRANULARITY (2ull << 20)

static uintptr_t last_handle = 0x1000, next_address = FIRST_ADDRESS;

static void *new_handle(void) { return (void *)__atomic_add_fetch(&last_handle, 16, __ATOMIC_RELAXED); }

static uint64_t new_address(size_t size) {
    uint64_t whole = (size + GRANULARITY) / GRANULARITY * GRANULARITY;
    return __atomic_fetch_add(&next_address, whole, __ATOMIC_RELAXED);
}

static int is_device(uint64_t address) { return FIRST_ADDRESS <= address && address < LAST_ADDRESS; }

// ---- the device ----

// Of CUdevice_attribute. Those that are not here are 0.
static const int ATTRIBUTES[][2] = {
    {1, 1024}, {2, 1024}, {3, 1024}, {4, 64},            // threads of a block, and its extents
    {5, 2147483647}, {6, 65535}, {7, 65535},             // extents of a grid
    {8, 49152}, {81, 233472}, {97, 232448}, {111, 1024}, // shared memory of a block, an SM, an opted-in block; reserved
    {9, 65536}, {12, 65536}, {82, 65536},                // constant memory, registers of a block and of an SM
    {10, 32}, {16, 132}, {39, 2048}, {106, 32},          // warp, SMs, threads and blocks of an SM
    {13, 1980000}, {36, 2619000}, {37, 5120},            // clocks in kHz, and bits of the memory's bus
    {38, 52428800}, {40, 3}, {31, 1}, {41, 1},           // L2 cache, copy engines, concurrent kernels, one address space
    {75, 9}, {76, 0},                                    // compute capability
    {78, 1}, {83, 1}, {89, 1}, {95, 1}, {115, 1},        // priorities, managed memory, cooperation, memory pools
    {102, 1}, {103, 1}, {120, 1}, {122, 1},              // memory can be mapped, and shared; clusters; stream writes
};

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = 0;
    for (size_t i = 0; i < sizeof ATTRIBUTES / sizeof *ATTRIBUTES; i++)
        if (ATTRIBUTES[i][0] == attribute) *value = ATTRIBUTES[i][1];
    return SUCCESS;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    return cuDeviceGetAttribute(value, attribute, device);
}

int cuDeviceComputeCapability(int *major, int *minor, int device) {
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, "NVIDIA H100 80GB HBM3", size);
    return SUCCESS;
}

int cuDeviceGetPCIBusId(char *id, int size, int device) {
    strncpy(id, "0000:00:04.0", size);
    return SUCCESS;
}

int cudaDeviceGetPCIBusId(char *id, int size, int device) { return cuDeviceGetPCIBusId(id, size, device); }

int cuDeviceGetUuid_v2(char *uuid, int device) {
    memset(uuid, 1, 16);
    return SUCCESS;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return SUCCESS;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return SUCCESS;
}

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return cuCtxGetStreamPriorityRange(least, greatest); }

// ---- names ----

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
    if (status) *status = *function ? 0 : 1;
    return SUCCESS;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

int cudaGetDriverEntryPoint(const char *name, void **function, uint64_t flags, int *status) {
    return cuGetProcAddress_v2(name, function, 0, flags, status);
}

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, uint64_t flags, int *status) {
    return cuGetProcAddress_v2(name, function, 0, flags, status);
}

int cuGetExportTable(void **table, void *id) { return NOT_FOUND; }

int cuGetErrorName(int error, const char **name) {
    *name = "an error of the stand-in";
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }
const char *cudaGetErrorName(int error) { return "an error of the stand-in"; }
const char *cudaGetErrorString(int error) { return cudaGetErrorName(error); }
const char *nvmlErrorString(int error) { return cudaGetErrorName(error); }

// ---- memory ----

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *free_bytes = FREE_BYTES;
    *total = TOTAL_BYTES;
    return SUCCESS;
}

int cudaMemGetInfo(size_t *free_bytes, size_t *total) { return cuMemGetInfo_v2(free_bytes, total); }

int cuMemAlloc_v2(uint64_t *address, size_t size) {
    *address = new_address(size);
    return SUCCESS;
}

int cuMemAddressReserve(uint64_t *address, size_t size) { return cuMemAlloc_v2(address, size); }
int cuMemAllocAsync(uint64_t *address, size_t size) { return cuMemAlloc_v2(address, size); }
int cuMemAllocFromPoolAsync(uint64_t *address, size_t size) { return cuMemAlloc_v2(address, size); }

int cuModuleGetGlobal_v2(uint64_t *address, size_t *size, void *module, const char *name) {
    if (address) *address = new_address(GRANULARITY);
    if (size) *size = GRANULARITY;
    return SUCCESS;
}

int cuMemHostAlloc(void **memory, size_t size) { return posix_memalign(memory, 4096, size ? size : 1); }
int cuMemAllocHost_v2(void **memory, size_t size) { return cuMemHostAlloc(memory, size); }

int cuMemFreeHost(void *memory) {
    free(memory);
    return SUCCESS;
}

int cuMemHostGetDevicePointer_v2(uint64_t *address, void *memory, unsigned flags) {
    *address = (uintptr_t)memory;
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size) {
    memset(target, 0, size);
    return SUCCESS;
}

int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t size) { return cuMemcpyDtoHAsync_v2(target, source, size); }

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
    if (base) *base = address;
    if (size) *size = 1 << 30;
    return SUCCESS;
}

int cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
    switch (attribute) {
    case 1: // the context
        *(void **)value = CONTEXT;
        break;
    case 2: // the kind of memory
        if (!is_device(address)) return INVALID_VALUE;
        *(unsigned *)value = 2;
        break;
    case 3: // the address on the device, and on the host
    case 4:
        *(uint64_t *)value = address;
        break;
    default:
        *(int *)value = 0;
    }
    return SUCCESS;
}

// A host waits for numbers that the device writes, so those in the host's memory are written.
int cuStreamWriteValue32_v2(void *stream, uint64_t address, uint32_t value) {
    if (!is_device(address)) *(volatile uint32_t *)address = value;
    return SUCCESS;
}

int cuStreamWriteValue64_v2(void *stream, uint64_t address, uint64_t value) {
    if (!is_device(address)) *(volatile uint64_t *)address = value;
    return SUCCESS;
}

// ---- kernels ----

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 64 : attribute == 7 ? 232448 : 0;
    return SUCCESS;
}

int cuFuncGetName(const char **name, void *function) {
    *name = "kernel";
    return SUCCESS;
}

int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
    if (index >= 8) return INVALID_VALUE;
    *offset = 8 * index;
    if (size) *size = 8;
    return SUCCESS;
}

int cudaFuncGetAttributes(void *attributes, const void *function) {
    memset(attributes, 0, 120);
    ((int *)attributes)[6] = 1024; // threads of a block
    return SUCCESS;
}

// ---- callbacks ----

struct callback {
    void (*of_host)(void *);
    void (*of_stream)(void *, int, void *);
    void *data, *stream;
    struct callback *next;
};

static struct callback *first, **end = &first;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;

static void *run_callbacks(void *unused) {
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!first) pthread_cond_wait(&more, &lock);
        struct callback *now = first;
        first = now->next;
        if (!first) end = &first;
        pthread_mutex_unlock(&lock);
        if (now->of_host) now->of_host(now->data);
        else now->of_stream(now->stream, SUCCESS, now->data);
        free(now);
    }
}

static void start_thread(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, run_callbacks, NULL);
}

static int call_later(struct callback what) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start_thread);
    struct callback *kept = malloc(sizeof what);
    *kept = what;
    pthread_mutex_lock(&lock);
    *end = kept;
    end = &kept->next;
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    return call_later((struct callback){.of_host = function, .data = data});
}

int cuStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *data, unsigned flags) {
    return call_later((struct callback){.of_stream = function, .data = data, .stream = stream});
}

// ---- graphs ----

static void *capturing, *captured; // the stream whose work is captured, and the graph

int cuStreamBeginCaptureToGraph(void *stream, void *graph) {
    capturing = stream;
    captured = graph;
    return SUCCESS;
}

int cuStreamBeginCapture_v2(void *stream, int mode) { return cuStreamBeginCaptureToGraph(stream, new_handle()); }

int cuStreamEndCapture(void *stream, void **graph) {
    *graph = captured;
    capturing = NULL;
    return SUCCESS;
}

int cuStreamIsCapturing(void *stream, int *is_capturing) {
    *is_capturing = stream && stream == capturing;
    return SUCCESS;
}

int cudaStreamIsCapturing(void *stream, int *is_capturing) { return cuStreamIsCapturing(stream, is_capturing); }

int cuStreamGetCaptureInfo_v2(
    void *stream, int *is_capturing, uint64_t *id, void **graph, void **dependencies, size_t *count
) {
    if (id) *id = 1;
    if (graph) *graph = captured;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    return cuStreamIsCapturing(stream, is_capturing);
}

int cuStreamGetCaptureInfo_v3(
    void *stream, int *is_capturing, uint64_t *id, void **graph, void **dependencies, void **edges, size_t *count
) {
    if (edges) *edges = NULL;
    return cuStreamGetCaptureInfo_v2(stream, is_capturing, id, graph, dependencies, count);
}

int cuGraphGetNodes(void *graph, void **nodes, size_t *count) { // an empty one would be refused
    if (nodes && *count) nodes[0] = new_handle();
    *count = 1;
    return SUCCESS;
}

int cuGraphGetRootNodes(void *graph, void **nodes, size_t *count) { return cuGraphGetNodes(graph, nodes, count); }

int cuGraphExecUpdate_v2(void *executable, void *graph, int *result) {
    *result = SUCCESS;
    return SUCCESS;
}

int cuGraphKernelNodeGetParams_v2(void *node, void *parameters) {
    memset(parameters, 0, 72);
    return SUCCESS;
}

struct node { // CUgraphNodeParams of a node that is conditional
    int type, reserved[3];
    struct {
        uint64_t handle;
        unsigned type, size;
        void **graphs;
    } conditional;
};

int cuGraphAddNode(void **node, void *graph, void *dependencies, size_t count, struct node *parameters) {
    *node = new_handle();
    if (parameters->type != 13) return SUCCESS;
    parameters->conditional.graphs = calloc(parameters->conditional.size, sizeof(void *));
    for (unsigned i = 0; i < parameters->conditional.size; i++) parameters->conditional.graphs[i] = new_handle();
    return SUCCESS;
}

int cuGraphAddNode_v2(void **node, void *graph, void *dependencies, void *edges, size_t count, struct node *parameters) {
    return cuGraphAddNode(node, graph, dependencies, count, parameters);
}
