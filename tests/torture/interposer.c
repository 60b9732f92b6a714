// Stands between a process and libc (LD_PRELOAD): counts what concerns a folder, lets it fail, and notes what it wrote.
//
// SQLite writes in C, where no hook of Python sees it. Python reaches this library through ctypes.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum mode { COUNT, FAIL_ONE, FAIL_SPACE, INTERRUPT, KILL };
enum event { WRITE = 'w', TRUNCATE = 't', SYNC = 's', SYNC_FOLDER = 'd', RENAME = 'r', UNLINK = 'u', CREATE = 'c' };

#define DESCRIPTORS 4096

static char prefix[4096];
static int active, recording, mode, fault_errno;
static long calls, at, failures;
static char *paths[DESCRIPTORS];
static char *events;
static size_t used, capacity;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

void torture_watch(const char *folder, int record) {
    pthread_mutex_lock(&lock);
    snprintf(prefix, sizeof prefix, "%s", folder);
    active = folder[0] != 0;
    recording = record;
    mode = COUNT;
    calls = failures = 0;
    used = 0;
    pthread_mutex_unlock(&lock);
}

void torture_fault(int how, long number, int error) {
    mode = how;
    at = number;
    fault_errno = error;
}

long torture_calls(void) { return calls; }
long torture_failures(void) { return failures; }
size_t torture_used(void) { return used; }
const char *torture_events(void) { return events; }

static int concerns(const char *path) { return active && path && strncmp(path, prefix, strlen(prefix)) == 0; }

// Counts a call; returns 0, or what errno has to become.
static int step(const char *path, int needs_space) {
    if (!concerns(path)) return 0;
    calls++;
    switch (mode) {
        case FAIL_ONE:
            if (calls != at) return 0;
            break;
        case FAIL_SPACE:
            if (calls < at || !needs_space) return 0;
            break;
        case INTERRUPT:
            if (calls == at) { failures++; raise(SIGINT); }
            return 0;
        case KILL:
            if (calls == at) kill(getpid(), SIGKILL);
            return 0;
        default:
            return 0;
    }
    failures++;
    return fault_errno;
}

static void put(const void *data, size_t size) {
    if (used + size > capacity) {
        capacity = 2 * (used + size) + (1 << 20);
        events = realloc(events, capacity);
    }
    memcpy(events + used, data, size);
    used += size;
}

// type, length of the path, length of the other path, offset, bytes of the data; then these.
static void note(char type, const char *path, const char *other, int64_t offset, const void *data, uint64_t size) {
    if (!recording || !concerns(path)) return;
    uint32_t lengths[2] = {(uint32_t)strlen(path), (uint32_t)strlen(other)};
    pthread_mutex_lock(&lock);
    put(&type, 1);
    put(lengths, sizeof lengths);
    put(&offset, sizeof offset);
    put(&size, sizeof size);
    put(path, lengths[0]);
    put(other, lengths[1]);
    if (data) put(data, size);
    pthread_mutex_unlock(&lock);
}

static const char *path_of(int fd) { return fd >= 0 && fd < DESCRIPTORS ? paths[fd] : NULL; }

static int opened(int fd, const char *path, int created) {
    if (fd >= 0 && fd < DESCRIPTORS) {
        free(paths[fd]);
        paths[fd] = concerns(path) ? strdup(path) : NULL;
        if (created) note(CREATE, path, "", 0, NULL, 0);
    }
    return fd;
}

static int open_it(int folder, const char *path, int flags, mode_t how) {
    int writes = flags & (O_CREAT | O_WRONLY | O_RDWR), error = step(path, flags & O_CREAT);
    if (error) { errno = error; return -1; }
    struct stat status;
    int created = (flags & O_CREAT) && concerns(path) && stat(path, &status) != 0;
    int fd = REAL(openat)(folder, path, flags, how);
    if (fd >= 0 && writes && (flags & O_TRUNC) && !created) note(TRUNCATE, path, "", 0, NULL, 0);
    return opened(fd, path, created);
}

#define MODE(flags, how) \
    mode_t how = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); how = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE(flags, how) return open_it(AT_FDCWD, path, flags, how); }
int open64(const char *path, int flags, ...) { MODE(flags, how) return open_it(AT_FDCWD, path, flags | O_LARGEFILE, how); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags, how) return open_it(folder, path, flags, how); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags, how) return open_it(folder, path, flags, how); }

int close(int fd) {
    if (fd >= 0 && fd < DESCRIPTORS && paths[fd]) { free(paths[fd]); paths[fd] = NULL; }
    return REAL(close)(fd);
}

#define GUARD(path, space, failed) \
    int error = step(path, space); \
    if (error) { errno = error; return failed; }

static ssize_t written(int fd, const void *data, ssize_t size, int64_t offset) {
    if (size > 0 && path_of(fd)) note(WRITE, path_of(fd), "", offset, data, (uint64_t)size);
    return size;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    GUARD(path_of(fd), 1, -1)
    return written(fd, data, REAL(pwrite64)(fd, data, size, offset), offset);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

ssize_t write(int fd, const void *data, size_t size) {
    GUARD(path_of(fd), 1, -1)
    int64_t offset = 0;
    if (path_of(fd)) {
        struct stat status;
        int append = fcntl(fd, F_GETFL) & O_APPEND;
        offset = append && fstat(fd, &status) == 0 ? status.st_size : lseek(fd, 0, SEEK_CUR);
    }
    return written(fd, data, REAL(write)(fd, data, size), offset);
}

ssize_t pread64(int fd, void *data, size_t size, off64_t offset) {
    GUARD(path_of(fd), 0, -1)
    return REAL(pread64)(fd, data, size, offset);
}
ssize_t pread(int fd, void *data, size_t size, off_t offset) { return pread64(fd, data, size, offset); }

ssize_t read(int fd, void *data, size_t size) {
    GUARD(path_of(fd), 0, -1)
    return REAL(read)(fd, data, size);
}

static int synced(int fd, int result) {
    struct stat status;
    if (result == 0 && path_of(fd) && fstat(fd, &status) == 0)
        note(S_ISDIR(status.st_mode) ? SYNC_FOLDER : SYNC, path_of(fd), "", 0, NULL, 0);
    return result;
}

int fsync(int fd) { GUARD(path_of(fd), 1, -1) return synced(fd, REAL(fsync)(fd)); }
int fdatasync(int fd) { GUARD(path_of(fd), 1, -1) return synced(fd, REAL(fdatasync)(fd)); }

int ftruncate64(int fd, off64_t size) {
    GUARD(path_of(fd), 1, -1)
    int result = REAL(ftruncate64)(fd, size);
    if (result == 0 && path_of(fd)) note(TRUNCATE, path_of(fd), "", size, NULL, 0);
    return result;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int unlink(const char *path) {
    GUARD(path, 0, -1)
    int result = REAL(unlink)(path);
    if (result == 0) note(UNLINK, path, "", 0, NULL, 0);
    return result;
}

int rename(const char *path, const char *other) {
    GUARD(path, 1, -1)
    int result = REAL(rename)(path, other);
    if (result == 0) note(RENAME, path, other, 0, NULL, 0);
    return result;
}
