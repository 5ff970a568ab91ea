/* Preloaded into a process: writes down every call that changes files below one folder, in order, and fails the call it
   is told to. It sees SQLite's and Arrow's calls as well as Python's. disk.py reads what it writes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { OPEN = 1, CLOSE, WRITE, TRUNCATE, SYNC, RENAME, LINK, UNLINK, MKDIR };
#define MAX_FILES 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[1024];
static size_t root_length;
static int log_file = -1;
static char tracked[MAX_FILES];

static int fault_op, fault_errno, fault_sticky;
static long fault_countdown, matched;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Starts watching a folder; without a log, calls are only counted and failed. */
void disk_watch(const char *folder, const char *log) {
    strncpy(root, folder, sizeof root - 1);
    root_length = strlen(root);
    log_file = log ? REAL(open64)(log, O_WRONLY | O_CREAT | O_TRUNC, 0644) : -1;
}

/* The `countdown`-th call of kind `op` (0: of any) fails with `error`; the later ones too when it is sticky. */
void disk_fail(int op, long countdown, int error, int sticky) {
    fault_op = op, fault_countdown = countdown, fault_errno = error, fault_sticky = sticky, matched = 0;
}

/* How many calls would have counted since disk_fail. */
long disk_matched(void) { return matched; }

static int inside(const char *path) { return root_length && !strncmp(path, root, root_length); }
static int known(int fd) { return fd >= 0 && fd < MAX_FILES && tracked[fd]; }

static int failing(int op) {
    if (!fault_errno || (fault_op && fault_op != op)) return 0;
    matched++;
    if (matched != fault_countdown && !(fault_sticky && matched > fault_countdown)) return 0;
    errno = fault_errno;
    return 1;
}

static void put(const void *data, size_t size) {
    while (size > 0) {
        ssize_t done = REAL(write)(log_file, data, size);
        if (done <= 0) return;
        data = (const char *)data + done, size -= done;
    }
}

static void note(int op, int fd, int64_t number, const void *first, size_t first_size, const void *second, size_t second_size) {
    if (log_file < 0) return;
    int saved = errno;
    int64_t head[5] = {op, fd, number, (int64_t)first_size, (int64_t)second_size};
    put(head, sizeof head), put(first, first_size), put(second, second_size);
    errno = saved;
}

static int opened(int fd, const char *path, int flags) {
    if (fd >= 0 && fd < MAX_FILES) tracked[fd] = 1;
    if (fd >= 0) note(OPEN, fd, flags, path, strlen(path), "", 0);
    return fd;
}

#define OPENING(name)                                                                                                  \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                       \
        va_end(rest);                                                                                                  \
        if (!inside(path)) return REAL(name)(path, flags, mode);                                                       \
        pthread_mutex_lock(&lock);                                                                                     \
        int writes = (flags & O_ACCMODE) != O_RDONLY;                                                                  \
        int fd = writes && failing(OPEN) ? -1 : opened(REAL(name)(path, flags, mode), path, flags);                    \
        pthread_mutex_unlock(&lock);                                                                                   \
        return fd;                                                                                                     \
    }
OPENING(open)
OPENING(open64)

int close(int fd) {
    if (!known(fd)) return REAL(close)(fd);
    pthread_mutex_lock(&lock);
    tracked[fd] = 0;
    note(CLOSE, fd, 0, "", 0, "", 0);
    int result = REAL(close)(fd);
    pthread_mutex_unlock(&lock);
    return result;
}

/* a full disk takes a part of a write before it refuses */
static ssize_t writing(int fd, const void *data, size_t size, int64_t offset) {
    pthread_mutex_lock(&lock);
    ssize_t done = -1;
    int fails = failing(WRITE);
    if (!fails || (errno == ENOSPC && size > 1)) {
        done = REAL(pwrite64)(fd, data, fails ? size / 2 : size, offset);
        if (done > 0) note(WRITE, fd, offset, data, done, "", 0);
    }
    pthread_mutex_unlock(&lock);
    return done;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    return known(fd) ? writing(fd, data, size, offset) : REAL(pwrite64)(fd, data, size, offset);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }
ssize_t write(int fd, const void *data, size_t size) {
    if (!known(fd)) return REAL(write)(fd, data, size);
    ssize_t done = writing(fd, data, size, lseek64(fd, 0, SEEK_CUR));
    if (done > 0) lseek64(fd, done, SEEK_CUR);
    return done;
}

#define ON_FILE(name, op, number, parameters, ...)                                                                     \
    int name parameters {                                                                                              \
        if (!known(fd)) return REAL(name)(__VA_ARGS__);                                                                \
        pthread_mutex_lock(&lock);                                                                                     \
        int result = failing(op) ? -1 : REAL(name)(__VA_ARGS__);                                                       \
        if (result == 0) note(op, fd, number, "", 0, "", 0);                                                           \
        pthread_mutex_unlock(&lock);                                                                                   \
        return result;                                                                                                 \
    }
ON_FILE(ftruncate64, TRUNCATE, length, (int fd, off64_t length), fd, length)

/* what is durable is decided by whoever reads the log, so a sync need not wait for the real disk */
#define SYNCING(name)                                                                                                  \
    int name(int fd) {                                                                                                 \
        if (!known(fd)) return REAL(name)(fd);                                                                         \
        pthread_mutex_lock(&lock);                                                                                     \
        int result = failing(SYNC) ? -1 : 0;                                                                           \
        if (result == 0) note(SYNC, fd, 0, "", 0, "", 0);                                                              \
        pthread_mutex_unlock(&lock);                                                                                   \
        return result;                                                                                                 \
    }
SYNCING(fsync)
SYNCING(fdatasync)
int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }

#define ON_NAMES(name, op, parameters, first, second, ...)                                                             \
    int name parameters {                                                                                              \
        if (!inside(first)) return REAL(name)(__VA_ARGS__);                                                            \
        pthread_mutex_lock(&lock);                                                                                     \
        int result = failing(op) ? -1 : REAL(name)(__VA_ARGS__);                                                       \
        if (result == 0) note(op, -1, 0, first, strlen(first), second, strlen(second));                                \
        pthread_mutex_unlock(&lock);                                                                                   \
        return result;                                                                                                 \
    }
ON_NAMES(rename, RENAME, (const char *from, const char *to), from, to, from, to)
ON_NAMES(link, LINK, (const char *from, const char *to), from, to, from, to)
ON_NAMES(unlink, UNLINK, (const char *path), path, "", path)
ON_NAMES(mkdir, MKDIR, (const char *path, mode_t mode), path, "", path, mode)
