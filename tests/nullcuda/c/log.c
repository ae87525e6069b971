// The log of all calls, and the errors that CUDA keeps for the next query.
#include <execinfo.h>
#include <pthread.h>
#include <sys/mman.h>
#include "nullcuda.h"

#define MAX_ENTRIES (1ull << 23)
static Entry *entries;
static uint64_t num_entries;
static int is_on;
static cudaError_t last_error;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *NAMES[NUM_KINDS] = {
  "nothing", "launch", "gemm", "copy", "fill", "graph", "collective", "register", "communicator", "record", "wait",
  "event_sync", "stream_sync", "device_sync", "malloc", "free", "pin", "begin_capture", "end_capture", "illegal",
};

void note(Kind kind, cudaStream_t stream, uint64_t object, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  if (!is_on) return;
  Stream *found = stream_of(stream);
  pthread_mutex_lock(&lock);
  if (!entries)
    entries = mmap(0, sizeof(Entry) * MAX_ENTRIES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (num_entries == MAX_ENTRIES) { fprintf(stderr, "nullcuda: the log is full\n"); abort(); }
  entries[num_entries++] = (Entry){kind, found->capture, found->id, object, {a, b, c, d}};
  pthread_mutex_unlock(&lock);
}

cudaError_t illegal(cudaError_t error, cudaStream_t stream, const char *call) {
  note(ILLEGAL, stream, error, (uint64_t)call, 0, 0, 0);
  fprintf(stderr, "nullcuda: CUDA refuses %s with error %d\n", call, error);
  if (getenv("NULLCUDA_TRACE")) {
    void *frames[40];
    backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
  }
  return last_error = error;
}

cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = 0; return error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(cudaError_t error) {
  static __thread char text[64];
  snprintf(text, sizeof text, "error %d of the null CUDA machine", error);
  return text;
}
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// For ../machine.py.
void nullcuda_log(int on) { is_on = on; }
void nullcuda_clear(void) { num_entries = 0; }
uint64_t nullcuda_size(void) { return num_entries; }
Entry *nullcuda_entries(void) { return entries; }
const char *nullcuda_kind(int kind) { return kind < NUM_KINDS ? NAMES[kind] : ""; }
uint64_t nullcuda_stream_id(void *stream) { return stream_of(stream)->id; }
