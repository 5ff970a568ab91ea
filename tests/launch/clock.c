/* Preloaded into a process: Python's wall clock is so many seconds ahead as SECONDS_AHEAD says. Other libraries get the
   time as it is, since they may hand it back to the kernel as the end of a wait. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int is_python(void *caller) {
    Dl_info found;
    if (!dladdr(caller, &found) || !found.dli_fname) return 0;
    const char *slash = strrchr(found.dli_fname, '/');
    const char *name = slash ? slash + 1 : found.dli_fname;
    return !strncmp(name, "python", 6) || !strncmp(name, "libpython", 9);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, at);
    const char *ahead = getenv("SECONDS_AHEAD");
    if (!code && clock == CLOCK_REALTIME && ahead && is_python(__builtin_return_address(0)))
        at->tv_sec += atol(ahead);
    return code;
}
