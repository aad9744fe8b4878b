//! Libraries for tests: an image in this process. A test chooses its answers.
// Handles are created by this module; pointers are the caller's, as in the real interface.
#![allow(clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // A test fails by a panic.

use super::library::{Changed, Functions, Handle, RawCallback, Watcher};
use libc::{c_char, c_int, c_void, size_t, ssize_t};
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Value of a simulated answer that stands for success.
pub(crate) const RIGHT: i64 = i64::MAX;

/// Simulated image of a Ceph cluster, for tests.
pub(crate) struct FakeImage {
    /// Identifier of the image in its cluster.
    id: String,
    pub(crate) size: AtomicU64,
    pub(crate) data: Mutex<Vec<u8>>,
    /// Result of every request: [`RIGHT`], or an error number.
    pub(crate) answer: AtomicI64,
    /// Result of the function that starts a request: [`RIGHT`], or an error number.
    pub(crate) refused: AtomicI64,
    /// Whether requests are held until they are released.
    pub(crate) holds: AtomicBool,
    held: Mutex<Vec<usize>>,
    /// Number of requests that were started.
    pub(crate) started: AtomicUsize,
    /// Whether the simulated cluster does not answer.
    pub(crate) away: AtomicBool,
    watch: Mutex<Option<(Changed, usize)>>,
}

static IMAGES: Mutex<BTreeMap<String, Arc<FakeImage>>> = Mutex::new(BTreeMap::new());

impl FakeImage {
    pub(crate) fn new(name: &str, size: u64) -> Arc<Self> {
        let image = Arc::new(Self {
            id: format!("id-{name}"),
            size: AtomicU64::new(size),
            data: Mutex::new(vec![0; size as usize]),
            answer: AtomicI64::new(RIGHT),
            refused: AtomicI64::new(0),
            holds: AtomicBool::new(false),
            held: Mutex::default(),
            started: AtomicUsize::new(0),
            away: AtomicBool::new(false),
            watch: Mutex::default(),
        });
        IMAGES
            .lock()
            .unwrap()
            .insert(name.to_owned(), image.clone());
        image
    }

    /// Ends all requests that are held.
    pub(crate) fn release(&self) {
        self.holds.store(false, Ordering::SeqCst);
        for completion in std::mem::take(&mut *self.held.lock().unwrap()) {
            end(completion);
        }
    }

    /// Changes the size of the image, and calls the watch's callback.
    pub(crate) fn resize(&self, size: u64) {
        self.size.store(size, Ordering::SeqCst);
        self.data.lock().unwrap().resize(size as usize, 0);
        if let Some((changed, argument)) = *self.watch.lock().unwrap() {
            changed(argument as *mut c_void);
        }
    }
}

struct Completion {
    argument: *mut c_void,
    ended: RawCallback,
    answer: i64,
}

fn end(completion: usize) {
    let handle = completion as Handle;
    // SAFETY: a completion that was made below, and has not ended.
    let completion = unsafe { &*handle.cast::<Completion>() };
    (completion.ended)(handle, completion.argument);
}

/// SAFETY: a handle that `open` has made, which lives as long as the process.
unsafe fn image<'a>(handle: Handle) -> &'a FakeImage {
    unsafe { &*handle.cast::<FakeImage>() }
}

fn start(handle: Handle, completion: Handle, right: i64, run: impl FnOnce(&FakeImage)) -> c_int {
    let image = unsafe { image(handle) };
    let refused = image.refused.load(Ordering::SeqCst);
    if refused != 0 {
        return refused as c_int;
    }
    image.started.fetch_add(1, Ordering::SeqCst);
    let answer = match image.answer.load(Ordering::SeqCst) {
        RIGHT => {
            run(image);
            right
        }
        answer => answer,
    };
    unsafe { (*completion.cast::<Completion>()).answer = answer };
    let completion = completion as usize;
    if image.holds.load(Ordering::SeqCst) {
        image.held.lock().unwrap().push(completion)
    } else {
        drop(std::thread::spawn(move || end(completion)))
    }
    0
}

extern "C" fn create(place: *mut Handle, _: *const c_char) -> c_int {
    unsafe { *place = 1 as Handle };
    0
}
extern "C" fn read_file(_: Handle, path: *const c_char) -> c_int {
    // Without a path the library looks in places of its own.
    if path.is_null() {
        return 0;
    }
    let path = unsafe { CStr::from_ptr(path) };
    match std::fs::metadata(path.to_str().unwrap()) {
        Ok(_) => 0,
        Err(error) => -error.raw_os_error().unwrap(),
    }
}
extern "C" fn set(_: Handle, _: *const c_char, _: *const c_char) -> c_int {
    0
}
extern "C" fn get(_: Handle, name: *const c_char, place: *mut c_char, len: size_t) -> c_int {
    let value = match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"mon_host" => c"127.0.0.1",
        b"auth_client_required" => c"none",
        _ => c"",
    };
    let value = value.to_bytes_with_nul();
    assert!(value.len() <= len);
    unsafe { std::ptr::copy_nonoverlapping(value.as_ptr().cast(), place, value.len()) };
    0
}
extern "C" fn fine(_: Handle) -> c_int {
    0
}
extern "C" fn nothing(_: Handle) {}
extern "C" fn context(_: Handle, _: *const c_char, place: *mut Handle) -> c_int {
    unsafe { *place = 2 as Handle };
    0
}
extern "C" fn namespace(_: Handle, _: *const c_char) {}
extern "C" fn open(_: Handle, name: *const c_char, place: *mut Handle, _: *const c_char) -> c_int {
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap();
    let images = IMAGES.lock().unwrap();
    let Some(image) = images.get(name) else {
        return -libc::ENOENT;
    };
    if image.away.load(Ordering::SeqCst) {
        return -libc::ETIMEDOUT;
    }
    unsafe { *place = Arc::into_raw(image.clone()).cast_mut().cast() };
    0
}
fn put_text(text: &str, place: *mut c_char, len: size_t) {
    assert!(len > text.len());
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), place, text.len()) };
    let end = unsafe { place.add(text.len()) };
    unsafe { *end = 0 };
}
extern "C" fn fsid(_: Handle, place: *mut c_char, len: size_t) -> c_int {
    put_text("fsid", place, len);
    4
}
extern "C" fn id(handle: Handle, place: *mut c_char, len: size_t) -> c_int {
    put_text(unsafe { &image(handle).id }, place, len);
    0
}
extern "C" fn size(handle: Handle, place: *mut u64) -> c_int {
    let size = unsafe { image(handle) }.size.load(Ordering::SeqCst);
    unsafe { *place = size };
    0
}
extern "C" fn features(_: Handle, place: *mut u64) -> c_int {
    unsafe { *place = 1 << 2 };
    0
}
extern "C" fn resize(handle: Handle, size: u64) -> c_int {
    unsafe { image(handle) }.resize(size);
    0
}
extern "C" fn is_owner(_: Handle, place: *mut c_int) -> c_int {
    unsafe { *place = 1 };
    0
}
extern "C" fn acquire(_: Handle, _: c_int) -> c_int {
    0
}
extern "C" fn owners(_: Handle, _: *mut c_int, _: *mut *mut c_char, _: *mut size_t) -> c_int {
    -libc::ENOENT
}
extern "C" fn owners_end(_: *mut *mut c_char, _: size_t) {}
extern "C" fn break_lock(_: Handle, _: c_int, _: *const c_char) -> c_int {
    0
}
extern "C" fn watchers(_: Handle, _: *mut Watcher, count: *mut size_t) -> c_int {
    unsafe { *count = 0 };
    0
}
extern "C" fn watchers_end(_: *mut Watcher, _: size_t) {}
extern "C" fn metadatum(_: Handle, _: *const c_char, _: *mut c_char, _: *mut size_t) -> c_int {
    -libc::ENOENT
}
extern "C" fn watch(
    handle: Handle,
    number: *mut u64,
    changed: Changed,
    argument: *mut c_void,
) -> c_int {
    unsafe { *number = 3 };
    *unsafe { image(handle) }.watch.lock().unwrap() = Some((changed, argument as usize));
    0
}
extern "C" fn unwatch(handle: Handle, _: u64) -> c_int {
    *unsafe { image(handle) }.watch.lock().unwrap() = None;
    0
}
extern "C" fn completion(argument: *mut c_void, ended: RawCallback, place: *mut Handle) -> c_int {
    let answer = 0;
    let made = Box::new(Completion {
        argument,
        ended,
        answer,
    });
    unsafe { *place = Box::into_raw(made).cast() };
    0
}
extern "C" fn answer(completion: Handle) -> ssize_t {
    unsafe { (*completion.cast::<Completion>()).answer as ssize_t }
}
extern "C" fn release(completion: Handle) {
    drop(unsafe { Box::from_raw(completion.cast::<Completion>()) });
}
extern "C" fn read(h: Handle, at: u64, len: size_t, to: *mut c_char, done: Handle) -> c_int {
    start(h, done, len as i64, |image| {
        let data = image.data.lock().unwrap();
        let data = &data[at as usize..at as usize + len];
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr().cast(), to, len) };
    })
}
extern "C" fn write(h: Handle, at: u64, len: size_t, from: *const c_char, done: Handle) -> c_int {
    start(h, done, 0, |image| {
        let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) };
        image.data.lock().unwrap()[at as usize..at as usize + len].copy_from_slice(from);
    })
}
extern "C" fn writev(
    h: Handle,
    list: *const libc::iovec,
    count: c_int,
    at: u64,
    done: Handle,
) -> c_int {
    start(h, done, 0, |image| {
        let mut at = at as usize;
        for part in unsafe { std::slice::from_raw_parts(list, count as usize) } {
            let from = part.iov_base.cast::<u8>();
            let from = unsafe { std::slice::from_raw_parts(from, part.iov_len) };
            image.data.lock().unwrap()[at..at + from.len()].copy_from_slice(from);
            at += from.len();
        }
    })
}
extern "C" fn flush(h: Handle, done: Handle) -> c_int {
    start(h, done, 0, |_| ())
}
extern "C" fn discard(h: Handle, at: u64, len: u64, done: Handle) -> c_int {
    zeroes(h, at, len as usize, done, 0, 0)
}
extern "C" fn zeroes(h: Handle, at: u64, len: size_t, done: Handle, _: c_int, _: c_int) -> c_int {
    start(h, done, 0, |image| {
        image.data.lock().unwrap()[at as usize..at as usize + len].fill(0);
    })
}

pub(super) static FUNCTIONS: Functions = Functions {
    rados_create: create,
    rados_conf_read_file: read_file,
    rados_conf_set: set,
    rados_conf_get: get,
    rados_connect: fine,
    rados_cluster_fsid: fsid,
    rados_shutdown: nothing,
    rados_ioctx_create: context,
    rados_ioctx_set_namespace: namespace,
    rados_ioctx_destroy: nothing,
    rbd_open: open,
    rbd_open_read_only: open,
    rbd_close: fine,
    rbd_get_id: id,
    rbd_get_size: size,
    rbd_get_features: features,
    rbd_resize: resize,
    rbd_is_exclusive_lock_owner: is_owner,
    rbd_lock_acquire: acquire,
    rbd_lock_release: fine,
    rbd_lock_get_owners: owners,
    rbd_lock_get_owners_cleanup: owners_end,
    rbd_lock_break: break_lock,
    rbd_watchers_list: watchers,
    rbd_watchers_list_cleanup: watchers_end,
    rbd_metadata_get: metadatum,
    rbd_metadata_set: set,
    rbd_update_watch: watch,
    rbd_update_unwatch: unwatch,
    rbd_aio_create_completion: completion,
    rbd_aio_get_return_value: answer,
    rbd_aio_release: release,
    rbd_aio_read: read,
    rbd_aio_write: write,
    rbd_aio_writev: writev,
    rbd_aio_flush: flush,
    rbd_aio_discard: discard,
    rbd_aio_write_zeroes: zeroes,
};
