/* A library to preload: the N-th file system call of a process below one folder kills it, or fails.
 *
 * What is to happen, and what has happened, stands in memory that the process shares with its test (injected.py).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <unistd.h>

/* The order is known to injected.py. The first ones change something. */
enum kind { CREATE, MKDIR, UNLINK, RENAME, FSYNC, WRITE, OPEN, READDIR, FSTAT, STAT, READ, CLOSE, FADVISE, STATFS, DUP, FDOPENDIR, LSEEK, ACCESS, READLINK };

struct control {
    int armed;
    int at;           /* the number of the call that is hit, from 1; 0: none */
    int effect;       /* an errno; -1: SIGKILL */
    int lasting;      /* all calls after it are hit, too */
    int carried_out;  /* a call that changes something is carried out, and then fails */
    unsigned counted; /* a bit per kind */
    atomic_int count, hits;
    char root[1024];
    char hit[2048];   /* the first that was hit */
    unsigned char seen[1 << 16];
};

static struct control *control;
static pid_t owner;

int injected_attach(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return -1;
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (control == MAP_FAILED) {
        control = NULL;
        return -1;
    }
    owner = getpid();
    return 0;
}

/* The path of a name below a descriptor, or of the descriptor itself. */
static int locate(int at, const char *name, char *path, size_t size)
{
    char link[64];
    ssize_t length = 0;
    if (!name || *name != '/') {
        if (at < 0)
            return 0;
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        static ssize_t (*real)(const char *, char *, size_t);
        if (!real)
            real = dlsym(RTLD_NEXT, "readlink");
        length = real(link, path, size - 1);
        if (length < 0)
            return 0;
        path[length] = 0;
    }
    if (name)
        snprintf(path + length, size - length, "%s%s", *name == '/' ? "" : "/", name);
    return 1;
}

/* What this call shall come to: 0 what it comes to, an errno, or an errno's negative once it was carried out. */
static int fate(enum kind kind, int at, const char *name)
{
    char path[2000];
    int saved = errno, result = 0;
    if (!control || !control->armed || getpid() != owner || !(control->counted >> kind & 1))
        return 0;
    size_t length = strlen(control->root);
    if (locate(at, name, path, sizeof path) && !strncmp(path, control->root, length) && (!path[length] || path[length] == '/' || path[length] == ' ')) {
        int number = atomic_fetch_add(&control->count, 1) + 1;
        if ((size_t) number <= sizeof control->seen)
            control->seen[number - 1] = kind;
        if (control->at && (number == control->at || (control->lasting && number > control->at))) {
            if (!atomic_fetch_add(&control->hits, 1))
                snprintf(control->hit, sizeof control->hit, "%s", path);
            if (control->effect < 0) {
                kill(getpid(), SIGKILL);
                for (;;)
                    pause();
            }
            result = control->carried_out && kind <= WRITE ? -control->effect : control->effect;
        }
    }
    errno = saved;
    return result;
}

#define REAL(name, arguments) ({ static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name); real arguments; })
#define INSTEAD(type, failure, kind, at, path, call) \
    int wanted = fate(kind, at, path); \
    if (wanted > 0) { \
        errno = wanted; \
        return failure; \
    } \
    type result = call; \
    if (wanted < 0 && result != failure) { \
        errno = -wanted; \
        return failure; \
    } \
    return result;
#define CALL(name, parameters, arguments, kind, at, path) int name parameters { INSTEAD(int, -1, kind, at, path, REAL(name, arguments)) }

#define OPENS(flags) ((flags) & O_CREAT ? CREATE : OPEN)
#define MODE va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest)
#define CALL_OPEN(name, parameters, arguments, at) int name parameters { MODE; INSTEAD(int, -1, OPENS(flags), at, path, REAL(name, arguments)) }
CALL_OPEN(open, (const char *path, int flags, ...), (path, flags, mode), -1)
CALL_OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), -1)
CALL_OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
CALL_OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)

CALL(mkdir, (const char *path, mode_t mode), (path, mode), MKDIR, -1, path)
CALL(mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), MKDIR, at, path)
CALL(unlink, (const char *path), (path), UNLINK, -1, path)
CALL(rmdir, (const char *path), (path), UNLINK, -1, path)
CALL(unlinkat, (int at, const char *path, int flags), (at, path, flags), UNLINK, at, path)
CALL(rename, (const char *path, const char *to), (path, to), RENAME, -1, path)
CALL(renameat, (int at, const char *path, int to_at, const char *to), (at, path, to_at, to), RENAME, at, path)
CALL(renameat2, (int at, const char *path, int to_at, const char *to, unsigned flags), (at, path, to_at, to, flags), RENAME, at, path)
CALL(fsync, (int fd), (fd), FSYNC, fd, NULL)
CALL(fdatasync, (int fd), (fd), FSYNC, fd, NULL)
ssize_t write(int fd, const void *from, size_t size) { INSTEAD(ssize_t, -1, WRITE, fd, NULL, REAL(write, (fd, from, size))) }

CALL(fstat, (int fd, struct stat *into), (fd, into), FSTAT, fd, NULL)
CALL(fstat64, (int fd, struct stat64 *into), (fd, into), FSTAT, fd, NULL)
CALL(stat, (const char *path, struct stat *into), (path, into), STAT, -1, path)
CALL(stat64, (const char *path, struct stat64 *into), (path, into), STAT, -1, path)
CALL(lstat, (const char *path, struct stat *into), (path, into), STAT, -1, path)
CALL(lstat64, (const char *path, struct stat64 *into), (path, into), STAT, -1, path)
CALL(fstatat, (int at, const char *path, struct stat *into, int flags), (at, path, into, flags), STAT, at, path)
CALL(fstatat64, (int at, const char *path, struct stat64 *into, int flags), (at, path, into, flags), STAT, at, path)
CALL(statx, (int at, const char *path, int flags, unsigned mask, struct statx *into), (at, path, flags, mask, into), STAT, at, path)
/* A Python that was built on an older libc calls these. */
int __fxstat64(int, int, struct stat64 *);
int __xstat64(int, const char *, struct stat64 *);
int __lxstat64(int, const char *, struct stat64 *);
int __fxstatat64(int, int, const char *, struct stat64 *, int);
CALL(__fxstat64, (int version, int fd, struct stat64 *into), (version, fd, into), FSTAT, fd, NULL)
CALL(__xstat64, (int version, const char *path, struct stat64 *into), (version, path, into), STAT, -1, path)
CALL(__lxstat64, (int version, const char *path, struct stat64 *into), (version, path, into), STAT, -1, path)
CALL(__fxstatat64, (int version, int at, const char *path, struct stat64 *into, int flags), (version, at, path, into, flags), STAT, at, path)
CALL(access, (const char *path, int mode), (path, mode), ACCESS, -1, path)
CALL(faccessat, (int at, const char *path, int mode, int flags), (at, path, mode, flags), ACCESS, at, path)
CALL(statvfs, (const char *path, struct statvfs *into), (path, into), STATFS, -1, path)
CALL(statvfs64, (const char *path, struct statvfs64 *into), (path, into), STATFS, -1, path)
CALL(fstatvfs, (int fd, struct statvfs *into), (fd, into), STATFS, fd, NULL)
CALL(fstatvfs64, (int fd, struct statvfs64 *into), (fd, into), STATFS, fd, NULL)
long fpathconf(int fd, int name) { INSTEAD(long, -1, STATFS, fd, NULL, REAL(fpathconf, (fd, name))) }
ssize_t readlink(const char *path, char *into, size_t size) { INSTEAD(ssize_t, -1, READLINK, -1, path, REAL(readlink, (path, into, size))) }
ssize_t readlinkat(int at, const char *path, char *into, size_t size)
{
    INSTEAD(ssize_t, -1, READLINK, at, path, REAL(readlinkat, (at, path, into, size)))
}

ssize_t read(int fd, void *into, size_t size) { INSTEAD(ssize_t, -1, READ, fd, NULL, REAL(read, (fd, into, size))) }
ssize_t pread64(int fd, void *into, size_t size, off64_t from) { INSTEAD(ssize_t, -1, READ, fd, NULL, REAL(pread64, (fd, into, size, from))) }
off64_t lseek64(int fd, off64_t by, int from) { INSTEAD(off64_t, -1, LSEEK, fd, NULL, REAL(lseek64, (fd, by, from))) }
off_t lseek(int fd, off_t by, int from) { INSTEAD(off_t, -1, LSEEK, fd, NULL, REAL(lseek, (fd, by, from))) }

/* These tell an error by what they return. */
int posix_fadvise(int fd, off_t from, off_t size, int advice)
{
    int wanted = fate(FADVISE, fd, NULL);
    return wanted ? wanted : REAL(posix_fadvise, (fd, from, size, advice));
}
int posix_fadvise64(int fd, off64_t from, off64_t size, int advice)
{
    int wanted = fate(FADVISE, fd, NULL);
    return wanted ? wanted : REAL(posix_fadvise64, (fd, from, size, advice));
}

DIR *fdopendir(int fd) { INSTEAD(DIR *, NULL, FDOPENDIR, fd, NULL, REAL(fdopendir, (fd))) }
DIR *opendir(const char *path) { INSTEAD(DIR *, NULL, OPEN, -1, path, REAL(opendir, (path))) }
struct dirent *readdir(DIR *folder) { INSTEAD(struct dirent *, NULL, READDIR, dirfd(folder), NULL, REAL(readdir, (folder))) }
struct dirent64 *readdir64(DIR *folder) { INSTEAD(struct dirent64 *, NULL, READDIR, dirfd(folder), NULL, REAL(readdir64, (folder))) }

#define DUPLICATES(name) \
    int name(int fd, int command, ...) \
    { \
        va_list rest; \
        va_start(rest, command); \
        void *argument = va_arg(rest, void *); \
        va_end(rest); \
        int wanted = command == F_DUPFD_CLOEXEC || command == F_DUPFD ? fate(DUP, fd, NULL) : 0; \
        if (wanted) { \
            errno = wanted; \
            return -1; \
        } \
        return REAL(name, (fd, command, argument)); \
    }
DUPLICATES(fcntl)
DUPLICATES(fcntl64)

/* Whatever a close says, the descriptor is gone (close(2)). */
int close(int fd)
{
    int wanted = fate(CLOSE, fd, NULL), result = REAL(close, (fd));
    if (!wanted)
        return result;
    errno = wanted;
    return -1;
}
int closedir(DIR *folder)
{
    int wanted = fate(CLOSE, dirfd(folder), NULL), result = REAL(closedir, (folder));
    if (!wanted)
        return result;
    errno = wanted;
    return -1;
}
