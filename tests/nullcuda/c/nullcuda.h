// What the files of the null machine share: the log, streams, captures, and where memory lies.
#pragma once
#define _GNU_SOURCE
#define __CUDA_RUNTIME_API_PTDS_H__
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "cuda_runtime_api.h"

// ../machine.py reads the log: keep its `Entry` and the names in log.c the same.
typedef enum {
  NOTHING, LAUNCH, GEMM, COPY, FILL, GRAPH, COLLECTIVE, REGISTER, COMMUNICATOR, RECORD, WAIT, EVENT_SYNC, STREAM_SYNC,
  DEVICE_SYNC, MALLOC, FREE, PIN, BEGIN_CAPTURE, END_CAPTURE, ILLEGAL, NUM_KINDS
} Kind;

// One call. `object` and the four values mean something else for each kind; the file that writes it says what.
typedef struct { uint64_t kind, capture, stream, object, values[4]; } Entry;

// A stream; `capture` numbers the capture that it belongs to, 0 for none. `device` is where it was made.
typedef struct { uint64_t id, capture; int priority, device; } Stream;

Stream *stream_of(cudaStream_t stream);
uint64_t active_capture(void);
// Whether a call that may synchronize is forbidden now: a capture is active, and this thread did not relax its mode.
int forbids_unsafe_calls(void);
int current_device(void);

void note(Kind kind, cudaStream_t stream, uint64_t object, uint64_t a, uint64_t b, uint64_t c, uint64_t d);
// Log a call that CUDA refuses, print it, and return the error that CUDA returns.
cudaError_t illegal(cudaError_t error, cudaStream_t stream, const char *call);
// Log one kernel; refuses what a launch refuses.
cudaError_t launch(const void *function, dim3 grid, cudaStream_t stream);
// Copy or fill where the bytes are few: enough for losses and flags, cheap for weights.
void move_bytes(void *to, const void *from, size_t bytes);
