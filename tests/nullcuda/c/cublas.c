// cuBLAS: a product is an entry in the log. Logged: GEMM (rows, columns, depth, batch; zeros by way of cublasLt).
#include "nullcuda.h"

typedef struct { void *stream; int pointer_mode, math_mode; } Handle;
enum { SUCCESS = 0, EXECUTION_FAILED = 13 };

int cublasCreate_v2(void **handle) { *handle = calloc(1, sizeof(Handle)); return SUCCESS; }
int cublasDestroy_v2(void *handle) { return SUCCESS; }
int cublasSetStream_v2(Handle *handle, void *stream) { handle->stream = stream; return SUCCESS; }
int cublasGetMathMode(Handle *handle, int *mode) { *mode = handle->math_mode; return SUCCESS; }
int cublasSetMathMode(Handle *handle, int mode) { handle->math_mode = mode; return SUCCESS; }
int cublasGetPointerMode_v2(Handle *handle, int *mode) { *mode = handle->pointer_mode; return SUCCESS; }
int cublasSetPointerMode_v2(Handle *handle, int mode) { handle->pointer_mode = mode; return SUCCESS; }

static int multiply(void *stream, uint64_t m, uint64_t n, uint64_t k, uint64_t batch) {
  if (stream == 0 && active_capture()) { illegal(906, stream, "a product on the legacy stream"); return EXECUTION_FAILED; }
  note(GEMM, stream, 0, m, n, k, batch);
  return SUCCESS;
}
typedef const void *In;
int cublasGemmEx(Handle *h, int ta, int tb, int m, int n, int k, In alpha, In a, int at, int lda, In b, int bt, int ldb, In beta, void *c,
                 int ct, int ldc, int compute, int algorithm) { return multiply(h->stream, m, n, k, 1); }
int cublasGemmStridedBatchedEx(Handle *h, int ta, int tb, int m, int n, int k, In alpha, In a, int at, int lda, long long sa, In b, int bt,
                               int ldb, long long sb, In beta, void *c, int ct, int ldc, long long sc, int batch, int compute, int algorithm) { return multiply(h->stream, m, n, k, batch); }
int cublasSgemm_v2(Handle *h, int ta, int tb, int m, int n, int k, In alpha, In a, int lda, In b, int ldb, In beta, void *c, int ldc) { return multiply(h->stream, m, n, k, 1); }
int cublasSgemmStridedBatched(Handle *h, int ta, int tb, int m, int n, int k, In alpha, In a, int lda, long long sa, In b, int ldb,
                              long long sb, In beta, void *c, int ldc, long long sc, int batch) { return multiply(h->stream, m, n, k, batch); }

size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtMatmul(void *h, void *description, In alpha, In a, void *ad, In b, void *bd, In beta, In c, void *cd, void *d, void *dd,
                   In algorithm, void *workspace, size_t bytes, void *stream) { return multiply(stream, 0, 0, 0, 0); }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *dd, void *preference, int wanted, void *result, int *found) {
  memset(result, 0, 64);
  *found = 1;
  return SUCCESS;
}
// torch hands these back and never looks inside.
static int make(void **made) { *made = calloc(1, 512); return SUCCESS; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return make(made); }
int cublasLtMatmulPreferenceCreate(void **made) { return make(made); }
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t stride) { return make(made); }
