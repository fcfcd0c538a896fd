/* Makes the n-th write, sync, rename or opening of files under a folder fail: loaded before libc (LD_PRELOAD).
 *
 * Nothing happens until fault_arm is called. Calls that libc makes within itself (fwrite) are not seen. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, RENAME = 3, OPEN = 4 };
enum { SHORT = -1, KILL = -2 };

static char folder[4096];
static int armed, operation, number, fault, lasting;
static atomic_int calls, faults;

/* The n-th call fails; all that follow too where it lasts. `fault` is an errno, SHORT or KILL; n = 0 only counts. */
void fault_arm(const char *under, int op, int n, int error, int lasts) {
    strncpy(folder, under, sizeof folder - 1);
    operation = op, number = n, fault = error, lasting = lasts, armed = 1;
}

int fault_calls(void) { return calls; }
int fault_count(void) { return faults; }

static int strikes(int op, const char *path) {
    if (!armed || op != operation || strncmp(path, folder, strlen(folder)) != 0)
        return 0;
    int n = ++calls;
    if (number == 0 || n < number || (n > number && !lasting))
        return 0;
    ++faults;
    if (fault == KILL)
        kill(getpid(), SIGKILL);
    errno = fault;
    return 1;
}

static int strikes_file(int op, int fd) {
    if (!armed || op != operation)
        return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return strikes(op, path);
}

static int strikes_at(int op, int fd, const char *name) {
    if (!armed || op != operation)
        return 0;
    if (name[0] == '/')
        return strikes(op, name);
    char link[64], path[8192];
    snprintf(link, sizeof link, fd == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, 4000);
    if (size < 0)
        return 0;
    snprintf(path + size, sizeof path - size, "/%s", name);
    return strikes(op, path);
}

#define NEXT(name) \
    static __typeof__(name) *next; \
    if (!next) \
        next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name);

#define WRITING(name, size, parameters, whole, half) \
    ssize_t name parameters { \
        NEXT(name) \
        if (strikes_file(WRITE, fd)) \
            return fault == SHORT && (size) > 1 ? half : fault == SHORT ? whole : -1; \
        return whole; \
    }

WRITING(write, n, (int fd, const void *data, size_t n), next(fd, data, n), next(fd, data, n / 2))
WRITING(pwrite, n, (int fd, const void *data, size_t n, off_t at), next(fd, data, n, at), next(fd, data, n / 2, at))
WRITING(pwrite64, n, (int fd, const void *data, size_t n, off64_t at), next(fd, data, n, at), next(fd, data, n / 2, at))
WRITING(writev, n, (int fd, const struct iovec *v, int n), next(fd, v, n), next(fd, v, n / 2))

ssize_t sendfile(int fd, int from, off_t *at, size_t n) {
    NEXT(sendfile)
    if (strikes_file(WRITE, fd))
        return fault == SHORT ? next(fd, from, at, n > 1 ? n / 2 : n) : -1;
    return next(fd, from, at, n);
}

int fsync(int fd) {
    NEXT(fsync)
    return strikes_file(SYNC, fd) ? -1 : next(fd);
}

int fdatasync(int fd) {
    NEXT(fdatasync)
    return strikes_file(SYNC, fd) ? -1 : next(fd);
}

int rename(const char *from, const char *to) {
    NEXT(rename)
    return strikes_at(RENAME, AT_FDCWD, to) ? -1 : next(from, to);
}

int renameat(int from_fd, const char *from, int to_fd, const char *to) {
    NEXT(renameat)
    return strikes_at(RENAME, to_fd, to) ? -1 : next(from_fd, from, to_fd, to);
}

int mkdir(const char *path, mode_t mode) {
    NEXT(mkdir)
    return strikes_at(OPEN, AT_FDCWD, path) ? -1 : next(path, mode);
}

#define OPENING(name, parameters, fd, call_) \
    int name parameters { \
        NEXT(name) \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && strikes_at(OPEN, fd, path)) \
            return -1; \
        return call_; \
    }

OPENING(open, (const char *path, int flags, ...), AT_FDCWD, next(path, flags, mode))
OPENING(open64, (const char *path, int flags, ...), AT_FDCWD, next(path, flags, mode))
OPENING(openat, (int at, const char *path, int flags, ...), at, next(at, path, flags, mode))
OPENING(openat64, (int at, const char *path, int flags, ...), at, next(at, path, flags, mode))
