/* TensorRT's entry points, forwarded to TensorRT-RTX, which has the same C++ interface and builds without a GPU.
   Compiled once for each of TensorRT's libraries; each needs only its own entry points, and the others do no harm. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static void *find(const char *file, const char *name)
{
    void *library = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        fprintf(stderr, "tensorrt_api: %s\n", dlerror());
        abort();
    }
    return found;
}

#define RTX(name) find("libtensorrt_rtx.so.1", name)
#define PARSER(name) find("libtensorrt_onnxparser_rtx.so.1", name)

/* The one thing that is replaced: a library refuses callers that were compiled for another version than its own. */
static int rtx_version(void) { return ((int (*)(void))RTX("getInferLibVersion"))(); }
int getNvOnnxParserVersion(void) { return ((int (*)(void))PARSER("getNvOnnxParserVersion"))(); }

void *createInferBuilder_INTERNAL(void *logger, int stated)
{
    (void)stated;
    return ((void *(*)(void *, int))RTX("createInferBuilder_INTERNAL"))(logger, rtx_version());
}

void *createInferRuntime_INTERNAL(void *logger, int stated)
{
    (void)stated;
    return ((void *(*)(void *, int))RTX("createInferRuntime_INTERNAL"))(logger, rtx_version());
}

void *createInferRefitter_INTERNAL(void *engine, void *logger, int stated)
{
    (void)stated;
    return ((void *(*)(void *, void *, int))RTX("createInferRefitter_INTERNAL"))(engine, logger, rtx_version());
}

void *getPluginRegistry(void) { return ((void *(*)(void))RTX("getPluginRegistry"))(); }

/* Of engines for DLA and for safety, which are not used. */
void *getBuilderPluginRegistry(int capability)
{
    (void)capability;
    return NULL;
}

void *createNvOnnxParser_INTERNAL(void *network, void *logger, int stated)
{
    (void)stated;
    return ((void *(*)(void *, void *, int))PARSER("createNvOnnxParser_INTERNAL"))(network, logger, getNvOnnxParserVersion());
}

void *createNvOnnxParserRefitter_INTERNAL(void *refitter, void *logger, int stated)
{
    (void)stated;
    return ((void *(*)(void *, void *, int))PARSER("createNvOnnxParserRefitter_INTERNAL"))(
        refitter, logger, getNvOnnxParserVersion());
}

/* TensorRT-RTX has no library of plugins: there are none to register. */
int initLibNvInferPlugins(void *logger, const char *name_space)
{
    (void)logger;
    (void)name_space;
    return 1;
}
