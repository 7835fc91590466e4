/* A plugin library with one creator, laid out as the C++ class nvinfer1::IPluginCreatorV3One: what a loader reads of it is real,
   and it creates nothing. */
#include <stddef.h>

typedef struct { const char *kind; int major, minor; } InterfaceInfo;
typedef struct { int count; const void *fields; } FieldCollection;

static int language(const void *self) { (void)self; return 0; }
static InterfaceInfo interface(const void *self) { (void)self; return (InterfaceInfo){"PLUGIN CREATOR_V3ONE", 1, 0}; }
static void destroy(void *self) { (void)self; }
static void *create(void *self, const char *name, const FieldCollection *fields, int phase)
{
    (void)self, (void)name, (void)fields, (void)phase;
    return NULL;
}
static const FieldCollection no_fields = {0, NULL};
static const FieldCollection *fields(void *self) { (void)self; return &no_fields; }
static const char *name(const void *self) { (void)self; return "OptpipeTestPlugin"; }
static const char *version(const void *self) { (void)self; return "1"; }
static const char *name_space(const void *self) { (void)self; return ""; }

static const void *const functions[] = {(void *)language, (void *)interface, (void *)destroy, (void *)destroy, (void *)create,
                                        (void *)fields, (void *)name, (void *)version, (void *)name_space};
static struct { const void *const *functions; } creator = {functions};
static void *const creators[] = {&creator};

void *const *getCreators(int *count)
{
    *count = 1;
    return creators;
}

void *const *getPluginCreators(int *count) /* of an older interface, which a loader looks for too */
{
    *count = 0;
    return NULL;
}

void setLoggerFinder(void *finder) { (void)finder; }
