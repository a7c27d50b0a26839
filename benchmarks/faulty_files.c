/* Makes calls for files fail, come late or be done in part, and sets the clock: LD_PRELOAD of the campaign's launchers.
 *
 * The file that FAULTY_FILES names is mapped into every process; faulty_files.py writes there what is to happen, which
 * holds at once for all of them, and reads how often it has happened.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, FSYNC = 4, RENAME = 8, MKDIR = 16, UNLINK = 32, READ = 64, CLOSE = 128 };

/* As faulty_files.py packs it. */
struct rule {
    int32_t calls;    /* which; 0: no rule */
    int32_t error;    /* errno of the call; 0: it is made */
    int32_t skip;     /* so many are left alone first */
    int32_t most;     /* so many are struck; negative: all */
    int32_t delay_ms; /* before the call */
    int32_t part;     /* a write or a read is of so many bytes at most; 0: whole */
    int64_t clock_s;  /* added to the wall clock */
    int32_t hits;
    char path[256];   /* that contain this */
};

static struct rule *rule;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void map_rule(void)
{
    const char *name = getenv("FAULTY_FILES");
    int file = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(struct rule), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) rule = found;
}

/* 0: the call is left alone; 1: it is struck, and made; -1: it fails, and errno says how. Waits where it is to be late. */
static int strikes(int call, const char *path)
{
    if (!rule || !(rule->calls & call) || !path || !strstr(path, rule->path)) return 0;
    if (rule->skip > 0 && __sync_fetch_and_sub(&rule->skip, 1) > 0) return 0;
    int before = __sync_fetch_and_add(&rule->hits, 1);
    if (rule->most >= 0 && before >= rule->most) return 0;
    if (rule->delay_ms) usleep((useconds_t)rule->delay_ms * 1000);
    if (!rule->error) return 1;
    errno = rule->error;
    return -1;
}

static int strikes_file(int call, int file)
{
    char link[64], path[1024];
    if (!rule || !(rule->calls & call)) return 0;
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length < 0) return 0;
    path[length] = 0;
    return strikes(call, path);
}

/* How much of a write or a read is done. */
static size_t part_of(int struck, size_t size)
{
    return struck && rule->part > 0 && size > (size_t)rule->part ? (size_t)rule->part : size;
}

#define OPENS(name) \
    int name(const char *path, int flags, ...) \
    { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        return strikes(OPEN, path) < 0 ? -1 : real(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name) \
    int name(int directory, const char *path, int flags, ...) \
    { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        return strikes(OPEN, path) < 0 ? -1 : real(directory, path, flags, mode); \
    }
OPENS_AT(openat)
OPENS_AT(openat64)

ssize_t write(int file, const void *bytes, size_t size)
{
    REAL(write);
    int struck = strikes_file(WRITE, file);
    return struck < 0 ? -1 : real(file, bytes, part_of(struck, size));
}

ssize_t writev(int file, const struct iovec *parts, int count)
{
    REAL(writev);
    return strikes_file(WRITE, file) < 0 ? -1 : real(file, parts, count);
}

#define WRITES_AT(name, offset_t) \
    ssize_t name(int file, const void *bytes, size_t size, offset_t offset) \
    { \
        REAL(name); \
        int struck = strikes_file(WRITE, file); \
        return struck < 0 ? -1 : real(file, bytes, part_of(struck, size), offset); \
    }
WRITES_AT(pwrite, off_t)
WRITES_AT(pwrite64, off64_t)

ssize_t read(int file, void *bytes, size_t size)
{
    REAL(read);
    int struck = strikes_file(READ, file);
    return struck < 0 ? -1 : real(file, bytes, part_of(struck, size));
}

#define READS_AT(name, offset_t) \
    ssize_t name(int file, void *bytes, size_t size, offset_t offset) \
    { \
        REAL(name); \
        int struck = strikes_file(READ, file); \
        return struck < 0 ? -1 : real(file, bytes, part_of(struck, size), offset); \
    }
READS_AT(pread, off_t)
READS_AT(pread64, off64_t)

int fsync(int file)
{
    REAL(fsync);
    return strikes_file(FSYNC, file) < 0 ? -1 : real(file);
}

int fdatasync(int file)
{
    REAL(fdatasync);
    return strikes_file(FSYNC, file) < 0 ? -1 : real(file);
}

int close(int file)
{
    REAL(close);
    int fails = strikes_file(CLOSE, file) < 0, error = errno;
    int done = real(file);
    if (!fails) return done;
    errno = error;
    return -1;
}

int rename(const char *from, const char *to)
{
    REAL(rename);
    return strikes(RENAME, to) < 0 ? -1 : real(from, to);
}

int renameat(int here, const char *from, int there, const char *to)
{
    REAL(renameat);
    return strikes(RENAME, to) < 0 ? -1 : real(here, from, there, to);
}

int mkdir(const char *path, mode_t mode)
{
    REAL(mkdir);
    return strikes(MKDIR, path) < 0 ? -1 : real(path, mode);
}

int mkdirat(int directory, const char *path, mode_t mode)
{
    REAL(mkdirat);
    return strikes(MKDIR, path) < 0 ? -1 : real(directory, path, mode);
}

int unlink(const char *path)
{
    REAL(unlink);
    return strikes(UNLINK, path) < 0 ? -1 : real(path);
}

int unlinkat(int directory, const char *path, int flags)
{
    REAL(unlinkat);
    return strikes(UNLINK, path) < 0 ? -1 : real(directory, path, flags);
}

int ftruncate(int file, off_t length)
{
    REAL(ftruncate);
    return strikes_file(WRITE, file) < 0 ? -1 : real(file, length);
}

int posix_fallocate(int file, off_t offset, off_t length)
{
    REAL(posix_fallocate);
    return strikes_file(WRITE, file) < 0 ? errno : real(file, offset, length);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    REAL(clock_gettime);
    int done = real(clock, now);
    if (rule && !done && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += rule->clock_s;
    return done;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    REAL(gettimeofday);
    int done = real(now, zone);
    if (rule && !done) now->tv_sec += rule->clock_s;
    return done;
}

time_t time(time_t *now)
{
    REAL(time);
    time_t found = real(NULL) + (rule ? rule->clock_s : 0);
    if (now) *now = found;
    return found;
}
