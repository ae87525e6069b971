// Streams, events and captures.
//
// Logged: RECORD and WAIT (object: event), EVENT_SYNC (event), STREAM_SYNC, BEGIN_CAPTURE and END_CAPTURE (object: capture).
// What CUDA promises: work of one stream runs in its order; cudaStreamWaitEvent orders a stream's later work after what
// the event's stream held when it was recorded; nothing else orders two streams. All streams are of the kind that does
// not wait for the legacy stream, as torch makes them.
#include "nullcuda.h"

typedef struct { uint64_t id, capture; int is_recorded; } Event;
static Stream legacy;
static uint64_t num_streams, num_events, num_captures, active;
// torch relaxes it while it allocates and while NCCL's watchdog queries events.
static __thread int mode = cudaStreamCaptureModeGlobal;

uint64_t active_capture(void) { return active; }
int forbids_unsafe_calls(void) { return active && mode != cudaStreamCaptureModeRelaxed; }
Stream *stream_of(cudaStream_t stream) {
  // 0, cudaStreamLegacy and cudaStreamPerThread.
  Stream *found = (uintptr_t)stream <= 2 ? &legacy : (Stream *)stream;
  if (found->capture != active) found->capture = 0;
  return found;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  Stream *made = malloc(sizeof *made);
  *made = (Stream){++num_streams, 0, priority, current_device()};
  *stream = (cudaStream_t)made;
  return 0;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return 0; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = stream_of(stream)->priority; return 0; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return stream_of(stream)->capture ? illegal(900, stream, "cudaStreamQuery") : 0; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream_of(stream)->capture || (stream == 0 && forbids_unsafe_calls())) return illegal(900, stream, "cudaStreamSynchronize");
  note(STREAM_SYNC, stream, 0, 0, 0, 0, 0);
  return 0;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  Event *made = calloc(1, sizeof *made);
  made->id = ++num_events;
  *event = (cudaEvent_t)made;
  return 0;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return 0; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Event *recorded = (Event *)event;
  recorded->capture = stream_of(stream)->capture;
  recorded->is_recorded = 1;
  note(RECORD, stream, recorded->id, 0, 0, 0, 0);
  return 0;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
// An event that was captured lives in its capture alone: to wait for it joins the capture, and is refused (907) once that
// has ended. A stream that is captured may not wait for work outside of the capture (905).
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  Event *awaited = (Event *)event;
  Stream *waiting = stream_of(stream);
  if (awaited->capture && awaited->capture != active) return illegal(907, stream, "cudaStreamWaitEvent");
  if (awaited->capture) waiting->capture = awaited->capture;
  else if (waiting->capture && awaited->is_recorded) return illegal(905, stream, "cudaStreamWaitEvent");
  note(WAIT, stream, awaited->id, 0, 0, 0, 0);
  return 0;
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return ((Event *)event)->capture ? illegal(907, 0, "cudaEventQuery") : 0; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (((Event *)event)->capture) return illegal(907, 0, "cudaEventSynchronize");
  note(EVENT_SYNC, 0, ((Event *)event)->id, 0, 0, 0, 0);
  return 0;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) { *ms = 1.0f; return 0; }

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode wanted) {
  active = ++num_captures;
  stream_of(stream)->capture = active;
  note(BEGIN_CAPTURE, stream, active, 0, 0, 0, 0);
  return 0;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  note(END_CAPTURE, stream, active, 0, 0, 0, 0);
  active = 0;
  *graph = (cudaGraph_t)1;
  return 0;
}
static enum cudaStreamCaptureStatus status_of(cudaStream_t stream) {
  return stream_of(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = status_of(stream); return 0; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *capture,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  *status = status_of(stream);
  if (capture) *capture = stream_of(stream)->capture;
  if (graph) *graph = (cudaGraph_t)1;
  if (nodes) *nodes = 0;
  if (edges) *edges = 0;
  if (count) *count = 0;
  return 0;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *wanted) {
  int before = mode;
  mode = *wanted;
  *wanted = before;
  return 0;
}
