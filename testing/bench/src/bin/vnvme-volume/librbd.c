/* librados and librbd with one image of zeroes, for counting the instructions of the code that calls
 * them. One thread ends each request a moment after it was started, when its caller waits. Written
 * data is dropped. */

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

typedef void *handle;
typedef void (*callback)(handle, void *);

enum { SIZE = 64 << 20, MICROSECONDS = 1000 };

struct completion {
    callback ended;
    void *argument;
    ssize_t result;
    struct completion *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t started = PTHREAD_COND_INITIALIZER;
static struct completion *first, **last = &first;

static void *end_requests(void *unused) {
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!first)
            pthread_cond_wait(&started, &lock);
        struct completion *one = first;
        first = one->next;
        if (!first)
            last = &first;
        pthread_mutex_unlock(&lock);
        usleep(MICROSECONDS);
        one->ended(one, one->argument);
    }
    return unused;
}

static int start(handle completion, ssize_t result) {
    struct completion *one = completion;
    one->result = result;
    one->next = NULL;
    pthread_mutex_lock(&lock);
    *last = one;
    last = &one->next;
    pthread_cond_signal(&started);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int put_text(const char *text, char *place, size_t size) {
    if (strlen(text) >= size)
        return -ERANGE;
    strcpy(place, text);
    return strlen(text);
}

int rados_create(handle *place, const char *id) { *place = (handle)1; return 0; }
int rados_conf_read_file(handle c, const char *path) { return 0; }
int rados_conf_set(handle c, const char *name, const char *value) { return 0; }
int rados_conf_get(handle c, const char *name, char *place, size_t size) {
    int is_address = !strcmp(name, "mon_host");
    put_text(is_address ? "127.0.0.1" : !strcmp(name, "auth_client_required") ? "none" : "", place, size);
    return 0;
}
int rados_connect(handle c) {
    pthread_t thread;
    return -pthread_create(&thread, NULL, end_requests, NULL);
}
int rados_cluster_fsid(handle c, char *place, size_t size) { return put_text("fsid", place, size); }
void rados_shutdown(handle c) {}
int rados_ioctx_create(handle c, const char *pool, handle *place) { *place = (handle)2; return 0; }
void rados_ioctx_set_namespace(handle x, const char *name) {}
void rados_ioctx_destroy(handle x) {}

int rbd_open(handle x, const char *name, handle *place, const char *snapshot) { *place = (handle)3; return 0; }
int rbd_open_read_only(handle x, const char *name, handle *place, const char *s) { return rbd_open(x, name, place, s); }
int rbd_close(handle i) { return 0; }
int rbd_get_id(handle i, char *place, size_t size) { put_text("id", place, size); return 0; }
int rbd_get_size(handle i, uint64_t *place) { *place = SIZE; return 0; }
int rbd_get_features(handle i, uint64_t *place) { *place = 1 << 2; return 0; }
int rbd_resize(handle i, uint64_t size) { return -EINVAL; }
int rbd_is_exclusive_lock_owner(handle i, int *place) { *place = 1; return 0; }
int rbd_lock_acquire(handle i, int mode) { return 0; }
int rbd_lock_release(handle i) { return 0; }
int rbd_lock_get_owners(handle i, int *mode, char **owners, size_t *count) { return -ENOENT; }
void rbd_lock_get_owners_cleanup(char **owners, size_t count) {}
int rbd_lock_break(handle i, int mode, const char *owner) { return 0; }
int rbd_watchers_list(handle i, void *list, size_t *count) { *count = 0; return 0; }
void rbd_watchers_list_cleanup(void *list, size_t count) {}
int rbd_metadata_get(handle i, const char *key, char *value, size_t *size) { return -ENOENT; }
int rbd_metadata_set(handle i, const char *key, const char *value) { return 0; }
int rbd_update_watch(handle i, uint64_t *number, void (*changed)(void *), void *argument) { *number = 1; return 0; }
int rbd_update_unwatch(handle i, uint64_t number) { return 0; }

int rbd_aio_create_completion(void *argument, callback ended, handle *place) {
    struct completion *one = malloc(sizeof *one);
    if (!one)
        return -ENOMEM;
    one->ended = ended;
    one->argument = argument;
    *place = one;
    return 0;
}
ssize_t rbd_aio_get_return_value(handle completion) { return ((struct completion *)completion)->result; }
void rbd_aio_release(handle completion) { free(completion); }
int rbd_aio_read(handle i, uint64_t offset, size_t size, char *to, handle completion) {
    memset(to, 0, size);
    return start(completion, size);
}
int rbd_aio_write(handle i, uint64_t offset, size_t size, const char *from, handle c) { return start(c, 0); }
int rbd_aio_writev(handle i, const struct iovec *from, int count, uint64_t offset, handle c) { return start(c, 0); }
int rbd_aio_flush(handle i, handle c) { return start(c, 0); }
int rbd_aio_discard(handle i, uint64_t offset, uint64_t size, handle c) { return start(c, 0); }
int rbd_aio_write_zeroes(handle i, uint64_t offset, size_t size, handle c, int flags, int op) { return start(c, 0); }
