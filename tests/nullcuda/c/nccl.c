// NCCL: a collective is an entry in the log; one rank's data stands for everybody's, where it is small.
//
// Logged: COLLECTIVE (object: operation + 256 * communicator; send address, send bytes, receive address, receive bytes),
// REGISTER (object: address; bytes, communicator, whether as a window), COMMUNICATOR (object: its number; ranks, CTA
// policy, most CTAs).
#include "nullcuda.h"

enum { SUCCESS = 0 };
enum { ALL_GATHER = 1, REDUCE_SCATTER, ALL_REDUCE, BROADCAST };
static const int BYTES[16] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 1, 1, 1, 1};  // of ncclDataType_t
typedef struct { uint64_t number; int size, rank; } Communicator;
typedef struct { char bytes[128]; } UniqueId;
// The beginning of ncclConfig_t (NCCL 2.28); -2147483648 says that a field was not set.
typedef struct {
  size_t size; unsigned magic, version; int blocking, cga_cluster_size, min_ctas, max_ctas; const char *net_name; int split_share,
  traffic_class; const char *name; int collnet_enable, cta_policy;
} Config;
static uint64_t num_communicators;

static int make(Communicator **made, int size, int rank, Config *config) {
  *made = malloc(sizeof **made);
  **made = (Communicator){++num_communicators, size, rank};
  note(COMMUNICATOR, 0, num_communicators, size, config ? (int64_t)config->cta_policy : -1, config ? (int64_t)config->max_ctas : -1, 0);
  return SUCCESS;
}
int ncclGetVersion(int *version) { *version = 22809; return SUCCESS; }
int ncclGetUniqueId(UniqueId *id) { memset(id, 7, sizeof *id); return SUCCESS; }
const char *ncclGetErrorString(int result) { return "an error of the null machine's NCCL"; }
const char *ncclGetLastError(void *communicator) { return ""; }
int ncclCommInitRank(Communicator **made, int size, UniqueId id, int rank) { return make(made, size, rank, 0); }
int ncclCommInitRankConfig(Communicator **made, int size, UniqueId id, int rank, Config *config) { return make(made, size, rank, config); }
int ncclCommInitRankScalable(Communicator **made, int size, int rank, int num_ids, UniqueId *ids, Config *config) { return make(made, size, rank, config); }
// The size of the part is not known here: nobody communicates, so that of the whole does.
int ncclCommSplit(Communicator *whole, int color, int key, Communicator **made, Config *config) { return make(made, whole->size, whole->rank, config); }
int ncclCommCount(Communicator *c, int *size) { *size = c->size; return SUCCESS; }
int ncclCommUserRank(Communicator *c, int *rank) { *rank = c->rank; return SUCCESS; }
int ncclCommGetAsyncError(Communicator *c, int *error) { *error = SUCCESS; return SUCCESS; }

static int collective(uint64_t operation, Communicator *c, void *stream, const void *from, size_t sent, void *to, size_t received) {
  note(COLLECTIVE, stream, operation + 256 * c->number, (uint64_t)from, sent, (uint64_t)to, received);
  return SUCCESS;
}
int ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *c, void *stream) {
  size_t bytes = count * BYTES[type];
  for (int rank = 0; rank < c->size; rank++)
    if ((char *)to + rank * bytes != from) move_bytes((char *)to + rank * bytes, from, bytes);
  return collective(ALL_GATHER, c, stream, from, bytes, to, bytes * c->size);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, Communicator *c, void *stream) {
  size_t bytes = count * BYTES[type];
  move_bytes(to, (char *)from + c->rank * bytes, bytes);
  return collective(REDUCE_SCATTER, c, stream, from, bytes * c->size, to, bytes);
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *c, void *stream) {
  size_t bytes = count * BYTES[type];
  move_bytes(to, from, bytes);
  return collective(ALL_REDUCE, c, stream, from, bytes, to, bytes);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *c, void *stream) {
  size_t bytes = count * BYTES[type];
  move_bytes(to, from, bytes);
  return collective(BROADCAST, c, stream, from, bytes, to, bytes);
}
int ncclBcast(void *both, size_t count, int type, int root, Communicator *c, void *stream) { return ncclBroadcast(both, both, count, type, root, c, stream); }

int ncclMemAlloc(void **address, size_t bytes) { return cudaMalloc(address, bytes); }
int ncclMemFree(void *address) { return cudaFree(address); }
int ncclCommRegister(Communicator *c, void *address, size_t bytes, void **handle) {
  *handle = address;
  note(REGISTER, 0, (uint64_t)address, bytes, c->number, 0, 0);
  return SUCCESS;
}
int ncclCommWindowRegister(Communicator *c, void *address, size_t bytes, void **window, int flags) {
  *window = address;
  note(REGISTER, 0, (uint64_t)address, bytes, c->number, 1, 0);
  return SUCCESS;
}
