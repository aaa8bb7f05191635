/* A file layer that fails: an LD_PRELOAD library between a program and libc.
 *
 *   fault_arm("/tmp/x/data", "/tmp/x/undo", 17, FAULT_EIO);
 *
 * Calls that change files below the first folder (and those that read them, if asked) are counted from 1, and the one with the given number fails: with an
 * error, by writing half of its bytes, by kill -9, or by a power cut. A power cut first undoes what the program has not
 * made durable: bytes that were written since the last fsync of their file, and names that were created, renamed or
 * removed since the last fsync of their folder. The undo folder holds what files were before.
 *
 * One mutex covers everything; the programs are small. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FAULT_NONE, FAULT_EIO, FAULT_ENOSPC, FAULT_SHORT, FAULT_KILL, FAULT_POWER };
enum { CHANGED, CREATED, RENAMED, EXCHANGED, REMOVED };

struct event {
  int what, live;
  char path[PATH_MAX], other[PATH_MAX]; /* other: the old name, or the copy of what was there ("" for nothing) */
};

static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static char g_folder[PATH_MAX], g_undo[PATH_MAX];
static int g_armed, g_reads, g_at, g_kind, g_count, g_copies;
static struct event *g_events;
static size_t g_events_count, g_events_room;

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* ---- raw file operations, which this library does not see */

static int raw_open(const char *path, int flags, int mode) {
  return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

static void raw_copy(const char *from, const char *to) {
  char buffer[65536];
  const int in = raw_open(from, O_RDONLY, 0), out = raw_open(to, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  ssize_t got;
  if (in >= 0 && out >= 0) {
    while ((got = syscall(SYS_read, in, buffer, sizeof buffer)) > 0) syscall(SYS_write, out, buffer, got);
  }
  if (in >= 0) syscall(SYS_close, in);
  if (out >= 0) syscall(SYS_close, out);
}

static int below(const char *path) {
  const size_t n = strlen(g_folder);
  return g_armed && !strncmp(path, g_folder, n) && (path[n] == '/' || path[n] == 0);
}

static void path_of(int fd, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, PATH_MAX - 1);
  path[n < 0 ? 0 : n] = 0;
}

static void path_at(int at, const char *name, char *path) {
  if (name[0] == '/' || at == AT_FDCWD) {
    if (name[0] == '/') {
      snprintf(path, PATH_MAX, "%s", name);
    } else {
      if (!getcwd(path, PATH_MAX)) path[0] = 0;
      const size_t n = strlen(path);
      snprintf(path + n, PATH_MAX - n, "/%s", name);
    }
  } else {
    path_of(at, path);
    const size_t n = strlen(path);
    snprintf(path + n, PATH_MAX - n, "/%s", name);
  }
}

/* ---- what is not durable yet */

static struct event *add(int what, const char *path, const char *other) {
  if (g_kind != FAULT_POWER) return NULL;
  if (g_events_count == g_events_room) {
    g_events_room = g_events_room ? 2 * g_events_room : 64;
    g_events = realloc(g_events, g_events_room * sizeof *g_events);
  }
  struct event *event = &g_events[g_events_count++];
  event->what = what;
  event->live = 1;
  snprintf(event->path, PATH_MAX, "%s", path);
  snprintf(event->other, PATH_MAX, "%s", other);
  return event;
}

static void add_with_copy(int what, const char *path) {
  struct stat found;
  char copy[PATH_MAX + 32] = "";
  if (g_kind != FAULT_POWER) return;
  if (stat(path, &found) == 0 && S_ISREG(found.st_mode)) {
    snprintf(copy, sizeof copy, "%s/%d", g_undo, g_copies++);
    raw_copy(path, copy);
  }
  add(what, path, copy);
}

static void before_change(const char *path) {
  for (size_t i = 0; i < g_events_count; ++i) {
    if (g_events[i].live && g_events[i].what == CHANGED && !strcmp(g_events[i].path, path)) return;
  }
  add_with_copy(CHANGED, path);
}

static int in_folder(const char *path, const char *folder) {
  const size_t n = strlen(folder);
  return !strncmp(path, folder, n) && path[n] == '/' && !strchr(path + n + 1, '/');
}

static int move_path(char *path, const char *from, const char *to) {
  const size_t n = strlen(from);
  char moved[2 * PATH_MAX];
  if (strncmp(path, from, n) || (path[n] != '/' && path[n])) return 0;
  snprintf(moved, sizeof moved, "%s%s", to, path + n);
  snprintf(path, PATH_MAX, "%.*s", PATH_MAX - 1, moved);
  return 1;
}

/* After an fsync of this file or folder. */
static void made_durable(const char *path) {
  for (size_t i = 0; i < g_events_count; ++i) {
    struct event *event = &g_events[i];
    if (!event->live) continue;
    if (event->what == CHANGED) {
      if (!strcmp(event->path, path)) event->live = 0;
    } else if (in_folder(event->path, path)) {
      event->live = 0;
      if (event->what == RENAMED || event->what == EXCHANGED) { /* older events are under new names now */
        for (size_t j = 0; j < i; ++j) {
          if (move_path(g_events[j].path, event->other, event->path)) continue;
          if (event->what == EXCHANGED) move_path(g_events[j].path, event->path, event->other);
        }
      }
    }
  }
}

static void cut_power(void) {
  for (size_t i = g_events_count; i-- > 0;) {
    const struct event *event = &g_events[i];
    if (!event->live) continue;
    if (event->what == CHANGED || event->what == REMOVED) {
      if (event->other[0]) {
        raw_copy(event->other, event->path);
      } else if (event->what == REMOVED) {
        syscall(SYS_mkdirat, AT_FDCWD, event->path, 0755);
      }
    } else if (event->what == CREATED) {
      if (syscall(SYS_unlinkat, AT_FDCWD, event->path, 0)) {
        syscall(SYS_unlinkat, AT_FDCWD, event->path, AT_REMOVEDIR);
      }
    } else {
      const unsigned flags = event->what == EXCHANGED ? 2 : 0; /* RENAME_EXCHANGE */
      syscall(SYS_renameat2, AT_FDCWD, event->path, AT_FDCWD, event->other, flags);
    }
  }
}

/* ---- the count */

void fault_arm(const char *folder, const char *undo, int at, int kind, int reads) {
  snprintf(g_folder, sizeof g_folder, "%s", folder);
  snprintf(g_undo, sizeof g_undo, "%s", undo);
  g_at = at;
  g_kind = kind;
  g_reads = reads;
  g_count = 0;
  g_armed = 1;
}

int fault_disarm(void) {
  g_armed = 0;
  return g_count;
}

/* Counts a call. True when it has to fail, with errno set; FAULT_SHORT is left to the caller. */
static int fails(void) {
  if (++g_count != g_at || g_kind == FAULT_NONE) return 0;
  if (g_kind == FAULT_POWER) cut_power();
  if (g_kind == FAULT_POWER || g_kind == FAULT_KILL) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
  }
  errno = g_kind == FAULT_ENOSPC ? ENOSPC : EIO;
  return 1;
}

#define ENTER pthread_mutex_lock(&g_mutex)
#define LEAVE(value) \
  do { \
    const __typeof__(value) result_ = (value); \
    const int error_ = errno; \
    pthread_mutex_unlock(&g_mutex); \
    errno = error_; \
    return result_; \
  } while (0)

/* ---- opening and names */

static int opened(int (*call)(int, const char *, int, mode_t), int at, const char *name, int flags, mode_t mode) {
  char path[PATH_MAX];
  const int changes = flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR);
  if (!g_armed || !(changes || g_reads)) return call(at, name, flags, mode);
  ENTER;
  path_at(at, name, path);
  if (!below(path)) LEAVE(call(at, name, flags, mode));
  if (fails() && g_kind != FAULT_SHORT) LEAVE(-1);
  struct stat found;
  const int exists = stat(path, &found) == 0;
  if (exists && (flags & O_TRUNC)) before_change(path);
  const int fd = call(at, name, flags, mode);
  if (fd >= 0 && !exists && changes) add(CREATED, path, "");
  LEAVE(fd);
}

static int call_openat(int at, const char *name, int flags, mode_t mode) {
  REAL(openat);
  return real(at, name, flags, mode);
}

#define MODE \
  mode_t mode = 0; \
  if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list rest; \
    va_start(rest, flags); \
    mode = va_arg(rest, mode_t); \
    va_end(rest); \
  }

int open(const char *name, int flags, ...) {
  MODE return opened(call_openat, AT_FDCWD, name, flags, mode);
}
int open64(const char *name, int flags, ...) {
  MODE return opened(call_openat, AT_FDCWD, name, flags, mode);
}
int openat(int at, const char *name, int flags, ...) {
  MODE return opened(call_openat, at, name, flags, mode);
}
int openat64(int at, const char *name, int flags, ...) {
  MODE return opened(call_openat, at, name, flags, mode);
}

static int made_folder(int at, const char *name, mode_t mode) {
  char path[PATH_MAX];
  ENTER;
  path_at(at, name, path);
  const int counted = below(path);
  if (counted && fails() && g_kind != FAULT_SHORT) LEAVE(-1);
  const int done = (int)syscall(SYS_mkdirat, at, name, mode);
  if (counted && done == 0) add(CREATED, path, "");
  LEAVE(done);
}
int mkdir(const char *name, mode_t mode) { return made_folder(AT_FDCWD, name, mode); }
int mkdirat(int at, const char *name, mode_t mode) { return made_folder(at, name, mode); }

int link(const char *from, const char *to) {
  char path[PATH_MAX];
  ENTER;
  path_at(AT_FDCWD, to, path);
  const int counted = below(path);
  if (counted && fails() && g_kind != FAULT_SHORT) LEAVE(-1);
  const int done = (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
  if (counted && done == 0) add(CREATED, path, "");
  LEAVE(done);
}

static int renamed(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
  char old_path[PATH_MAX], new_path[PATH_MAX];
  ENTER;
  path_at(from_at, from, old_path);
  path_at(to_at, to, new_path);
  const int counted = below(old_path) || below(new_path);
  if (counted && fails() && g_kind != FAULT_SHORT) LEAVE(-1);
  struct stat found;
  if (counted && !flags && stat(new_path, &found) == 0) add_with_copy(REMOVED, new_path);
  const int done = (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
  if (counted && done == 0) add(flags & 2 ? EXCHANGED : RENAMED, new_path, old_path);
  LEAVE(done);
}
int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return renamed(a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  return renamed(a, from, b, to, flags);
}

static int removed(int at, const char *name, int flags) {
  char path[PATH_MAX];
  ENTER;
  path_at(at, name, path);
  const int counted = below(path);
  if (counted && fails() && g_kind != FAULT_SHORT) LEAVE(-1);
  if (counted) add_with_copy(REMOVED, path);
  const int done = (int)syscall(SYS_unlinkat, at, name, flags);
  if (counted && done && g_kind == FAULT_POWER) g_events[g_events_count - 1].live = 0;
  LEAVE(done);
}
int unlink(const char *name) { return removed(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return removed(AT_FDCWD, name, AT_REMOVEDIR); }
int unlinkat(int at, const char *name, int flags) { return removed(at, name, flags); }
int remove(const char *name) {
  const int done = removed(AT_FDCWD, name, 0);
  return done && errno == EISDIR ? removed(AT_FDCWD, name, AT_REMOVEDIR) : done;
}

/* ---- bytes */

static ssize_t written(int fd, const void *data, size_t bytes, int64_t offset) {
  char path[PATH_MAX];
  const int placed = offset >= 0;
  ENTER;
  if (g_armed) path_of(fd, path);
  if (g_armed && below(path)) {
    if (fails()) {
      if (g_kind != FAULT_SHORT || bytes < 2) LEAVE((ssize_t)-1);
      bytes /= 2;
    }
    before_change(path);
  }
  LEAVE((ssize_t)(placed ? syscall(SYS_pwrite64, fd, data, bytes, offset) : syscall(SYS_write, fd, data, bytes)));
}
ssize_t write(int fd, const void *data, size_t bytes) { return written(fd, data, bytes, -1); }
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t at) { return written(fd, data, bytes, at); }
ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t at) { return written(fd, data, bytes, at); }

static int cut(int fd, int64_t bytes) {
  char path[PATH_MAX];
  ENTER;
  path_of(fd, path);
  if (below(path)) {
    if (fails() && g_kind != FAULT_SHORT) LEAVE(-1);
    before_change(path);
  }
  LEAVE((int)syscall(SYS_ftruncate, fd, bytes));
}
int ftruncate(int fd, off_t bytes) { return cut(fd, bytes); }
int ftruncate64(int fd, off_t bytes) { return cut(fd, bytes); }

static int synced(int fd, long call) {
  char path[PATH_MAX];
  ENTER;
  path_of(fd, path);
  const int counted = below(path);
  if (counted && fails() && g_kind != FAULT_SHORT) LEAVE(-1);
  const int done = (int)syscall(call, fd);
  if (counted && done == 0) made_durable(path);
  LEAVE(done);
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

/* ---- reading; only counted when asked for */

static int read_fails(int fd) {
  char path[PATH_MAX];
  if (!g_armed || !g_reads || fd < 0) return 0;
  path_of(fd, path);
  return below(path) && fails();
}

static ssize_t got(int fd, const struct iovec *parts, int count, int64_t offset) {
  ENTER;
  if (read_fails(fd)) {
    if (g_kind != FAULT_SHORT || parts[0].iov_len < 2) LEAVE((ssize_t)-1);
    const struct iovec half = {parts[0].iov_base, parts[0].iov_len / 2};
    LEAVE((ssize_t)(offset < 0 ? syscall(SYS_readv, fd, &half, 1) : syscall(SYS_preadv, fd, &half, 1, offset, 0)));
  }
  LEAVE((ssize_t)(offset < 0 ? syscall(SYS_readv, fd, parts, count) : syscall(SYS_preadv, fd, parts, count, offset, 0)));
}
ssize_t read(int fd, void *data, size_t bytes) {
  const struct iovec part = {data, bytes};
  return got(fd, &part, 1, -1);
}
ssize_t pread(int fd, void *data, size_t bytes, off_t at) {
  const struct iovec part = {data, bytes};
  return got(fd, &part, 1, at);
}
ssize_t pread64(int fd, void *data, size_t bytes, off_t at) { return pread(fd, data, bytes, at); }
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at) { return got(fd, parts, count, at); }
ssize_t preadv64(int fd, const struct iovec *parts, int count, off_t at) { return got(fd, parts, count, at); }
ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
  (void)flags;
  return got(fd, parts, count, at);
}
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
  (void)flags;
  return got(fd, parts, count, at);
}

int mapping_refused(const void *caller); /* trust/fault_memory.c */

static void *mapped(void *where, size_t bytes, int protection, int flags, int fd, off_t at, const void *caller) {
  if (mapping_refused(caller)) return MAP_FAILED;
  if (g_armed && g_reads && fd >= 0) {
    ENTER;
    const int failed = read_fails(fd) && g_kind != FAULT_SHORT;
    const int error = errno;
    pthread_mutex_unlock(&g_mutex);
    errno = error;
    if (failed) return MAP_FAILED;
  }
  return (void *)syscall(SYS_mmap, where, bytes, protection, flags, fd, at);
}
void *mmap(void *where, size_t bytes, int protection, int flags, int fd, off_t at) {
  return mapped(where, bytes, protection, flags, fd, at, __builtin_return_address(0));
}
void *mmap64(void *where, size_t bytes, int protection, int flags, int fd, off_t at) {
  return mapped(where, bytes, protection, flags, fd, at, __builtin_return_address(0));
}

DIR *opendir(const char *name) {
  REAL(opendir);
  char path[PATH_MAX];
  if (g_armed && g_reads) {
    ENTER;
    path_at(AT_FDCWD, name, path);
    const int failed = below(path) && fails() && g_kind != FAULT_SHORT;
    const int error = errno;
    pthread_mutex_unlock(&g_mutex);
    errno = error;
    if (failed) return NULL;
  }
  return real(name);
}
