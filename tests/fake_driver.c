/* A CUDA driver's library without a GPU: it runs the kernel of cut_kernel.cu on the CPU.
 *
 * A launch gets the arguments and the grid that a GPU would get. `fake_queue` is called with it, and calls `fake_run`
 * when its stream gets there. Misuse that a driver reports is reported here, too.
 */
#include <stdlib.h>
#include <string.h>

#include "cut_kernel.cu"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    Cut cut;
    unsigned int samples, blocks, threads;
} Launch;

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_PTX = 218, NOT_FOUND = 500, FAILED = 999 };

EXPORT char fake_failing[64]; /* name of the function that fails */
EXPORT int fake_spoils;       /* a wrong pixel in each batch */
EXPORT void (*fake_queue)(void *stream, const Launch *launch, int bytes);

static char context, module, function; /* their addresses are the handles */
static int depth;                      /* contexts that are pushed */
static int is_begun;

static int enter(const char *name)
{
    return strcmp(name, fake_failing) ? 0 : FAILED;
}

EXPORT void fake_run(const Launch *launch)
{
    unsigned int step = launch->blocks * launch->threads;
    for (unsigned int sample = 0; sample < launch->samples; sample++)
        for (unsigned int first = 0; first < step; first++)
            cut_pixels(&launch->cut, sample, first, step);
    if (fake_spoils)
        *(unsigned short *)launch->cut.out ^= 0x40;
}

EXPORT int fake_depth(void)
{
    return depth;
}

EXPORT int cuInit(unsigned int flags)
{
    is_begun = 1;
    return flags ? INVALID_VALUE : enter("cuInit");
}

EXPORT int cuDeviceGet(int *device, int number)
{
    *device = number;
    return is_begun ? enter("cuDeviceGet") : INVALID_CONTEXT;
}

EXPORT int cuDevicePrimaryCtxRetain(void **made, int device)
{
    (void)device;
    *made = &context;
    return enter("cuDevicePrimaryCtxRetain");
}

EXPORT int cuCtxPushCurrent_v2(void *pushed)
{
    if (pushed != &context)
        return INVALID_CONTEXT;
    int failed = enter("cuCtxPushCurrent_v2");
    depth += !failed;
    return failed;
}

EXPORT int cuCtxPopCurrent_v2(void **popped)
{
    *popped = &context;
    return --depth < 0 ? INVALID_CONTEXT : 0;
}

/* Accepts PTX of a kernel whose one argument is as large as the struct. */
EXPORT int cuModuleLoadData(void **made, const char *ptx)
{
    const char *entry = strstr(ptx, ".entry fastdata_cut(");
    const char *size = entry ? strchr(entry, '[') : NULL;
    if (!depth)
        return INVALID_CONTEXT;
    if (!size || atoi(size + 1) != (int)sizeof(Cut))
        return INVALID_PTX;
    *made = &module;
    return enter("cuModuleLoadData");
}

EXPORT int cuModuleGetFunction(void **made, void *from, const char *name)
{
    if (from != &module || strcmp(name, "fastdata_cut"))
        return NOT_FOUND;
    *made = &function;
    return depth ? enter("cuModuleGetFunction") : INVALID_CONTEXT;
}

EXPORT int cuLaunchKernel(void *launched, unsigned int x, unsigned int y, unsigned int z, unsigned int threads,
                          unsigned int threads_y, unsigned int threads_z, unsigned int shared_bytes, void *stream,
                          void **arguments, void **extra)
{
    if (!depth || launched != &function)
        return INVALID_CONTEXT;
    if (!x || !y || y > 65535 || z != 1 || !threads || threads > 1024 || threads_y != 1 || threads_z != 1 ||
        shared_bytes || extra)
        return INVALID_VALUE;
    if (enter("cuLaunchKernel"))
        return FAILED;
    Launch launch = {.samples = x, .blocks = y, .threads = threads};
    memcpy(&launch.cut, arguments[0], sizeof launch.cut);
    fake_queue(stream, &launch, (int)sizeof launch);
    return 0;
}
