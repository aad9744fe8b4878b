//! Clusters and images, by the C libraries librados and librbd. The one module of this crate with
//! `unsafe` code.
//!
//! It is sound for these reasons. A handle is used by its owner's methods alone, and ended by its
//! owner's drop, after everything that was made of it ([`Image`] has its [`Cluster`]). The
//! libraries may be called by several threads at a time. A request's memory belongs to a
//! [`Pending`] until the library has reported its end. A guest's memory is read within a call, and
//! the library has none of it afterwards.
#![allow(unsafe_code)]

#[cfg(test)]
pub(crate) mod fake;
mod library;

pub use library::{LIBRARY_PATH, LibraryError};

use dma::{Buffer, SegmentList};
use libc::{c_char, c_int, c_void};
use library::{Functions, Handle, Watcher, functions};
use std::ffi::{CStr, CString};
use std::io;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Lock mode RBD_LOCK_MODE_EXCLUSIVE of librbd.
const EXCLUSIVE: c_int = 0;
/// Flag RBD_WRITE_ZEROES_FLAG_THICK_PROVISION: the space of zeroes stays allocated.
const THICK: c_int = 1;
/// Stack size in bytes of a thread that calls the library.
pub const STACK: usize = 4 << 20;
/// Maximum number of watchers of an image that are read.
const MAX_WATCHERS: usize = 64;
/// Maximum length in bytes of the value of a setting or of image metadata.
const MAX_VALUE_LEN: usize = 4096;

/// Loads the libraries, if they are not there yet.
///
/// # Errors
/// [`LibraryError`].
pub fn load() -> Result<(), LibraryError> {
    functions().map(drop)
}

/// Number of cluster clients that exist in the process.
static LIVE_CLIENTS: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" {
    /// on_exit(3): the last one that was given is called first.
    fn on_exit(call: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Exit handler of the process. The libraries' own destructors would free data of their threads,
/// which run as long as there is a client: a cluster that does not answer keeps one.
extern "C" fn process_ends(status: c_int, _: *mut c_void) {
    for _ in 0..100 {
        if LIVE_CLIENTS.load(Ordering::SeqCst) == 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    // SAFETY: it ends the process, which was about to end.
    unsafe { libc::_exit(status) }
}

fn check(answer: c_int) -> io::Result<()> {
    match answer {
        0.. => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno.saturating_neg())),
    }
}

fn text(text: &str) -> io::Result<CString> {
    CString::new(text).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Client of a Ceph cluster, connected or not.
pub struct Cluster {
    functions: &'static Functions,
    handle: Handle,
}

// SAFETY: librados' handles are for any thread.
unsafe impl Send for Cluster {}
// SAFETY: and for several at a time.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Creates a client of that name (`admin` for `client.admin`), which knows no cluster yet.
    ///
    /// # Errors
    /// The library's.
    pub fn new(id: &str) -> io::Result<Self> {
        let functions = functions().map_err(io::Error::other)?;
        let (mut handle, id) = (null_mut(), text(id)?);
        // SAFETY: a place for the handle, and a string with its end.
        check(unsafe { (functions.rados_create)(&raw mut handle, id.as_ptr()) })?;
        LIVE_CLIENTS.fetch_add(1, Ordering::SeqCst);
        Ok(Self { functions, handle })
    }

    /// Reads the settings of a file; none: of the file that the library looks for.
    ///
    /// # Errors
    /// The library's.
    pub fn read_settings(&self, path: Option<&str>) -> io::Result<()> {
        let path = path.map(text).transpose()?;
        let path = path.as_ref().map_or(null(), |path| path.as_ptr());
        // SAFETY: a handle that was not ended, and a string with its end or none.
        check(unsafe { (self.functions.rados_conf_read_file)(self.handle, path) })
    }

    /// Sets a configuration option of the client.
    ///
    /// # Errors
    /// The library's error: it does not know the option.
    pub fn set(&self, name: &str, value: &str) -> io::Result<()> {
        let (name, value) = (text(name)?, text(value)?);
        // SAFETY: a handle that was not ended, and strings with their ends.
        check(unsafe {
            (self.functions.rados_conf_set)(self.handle, name.as_ptr(), value.as_ptr())
        })
    }

    /// Returns the value of a setting.
    ///
    /// # Errors
    /// The library's, if the setting is unknown.
    pub fn get(&self, name: &str) -> io::Result<String> {
        let name = text(name)?;
        let mut value = vec![0u8; MAX_VALUE_LEN];
        let place = value.as_mut_ptr().cast::<c_char>();
        // SAFETY: a handle that was not ended, a string with its end, a place of that length.
        check(unsafe {
            (self.functions.rados_conf_get)(self.handle, name.as_ptr(), place, MAX_VALUE_LEN - 1)
        })?;
        let value = CStr::from_bytes_until_nul(&value).unwrap_or_default();
        Ok(value.to_string_lossy().into_owned())
    }

    /// Connects, and waits for that: up to the setting `client_mount_timeout`.
    ///
    /// # Errors
    /// The library's.
    pub fn connect(&self) -> io::Result<()> {
        // SAFETY: a handle that was not ended.
        check(unsafe { (self.functions.rados_connect)(self.handle) })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: a handle that was not ended, and nothing that was made of it is left.
        unsafe { (self.functions.rados_shutdown)(self.handle) };
        LIVE_CLIENTS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Name of an image or snapshot, with its pool and namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// Name of the pool.
    pub pool: String,
    /// Name of the namespace in the pool; empty for the default namespace.
    pub namespace: String,
    /// Name of the image.
    pub image: String,
    /// Name of a snapshot of the image; `None` for the image itself.
    pub snapshot: Option<String>,
}

/// Open image of a Ceph cluster, or an open snapshot.
pub struct Image {
    handle: Handle,
    /// I/O context of the pool that the image is in.
    context: Handle,
    /// Registration of the callback that [`Image::watch`] has set, and its handle.
    watch: Option<(u64, Box<Watch>)>,
    cluster: Cluster,
}

struct Watch(Box<dyn Fn() + Send + Sync>);

// SAFETY: librbd's handles are for any thread.
unsafe impl Send for Image {}
// SAFETY: and for several at a time; `watch` is changed by its owner alone.
unsafe impl Sync for Image {}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").finish_non_exhaustive()
    }
}

/// Request that the library is executing.
struct Pending {
    functions: &'static Functions,
    /// Memory that the library reads into, or writes from.
    buffer: Option<Buffer>,
    done: CompletionCallback,
    /// Reference that keeps the image open until the request has ended.
    _image: Arc<Image>,
}

/// Called with the library's answer (negative: an error number), and the memory, by a thread of the
/// library's. May not block.
pub type CompletionCallback = Box<dyn FnOnce(isize, Option<Buffer>) + Send>;

/// Operation of a request to an image.
pub enum ImageOperation<'a> {
    /// Read enough to fill the buffer.
    Read(Buffer),
    /// Write all of it, from a memory that the library copies within the call.
    Write(&'a SegmentList),
    /// Write the whole buffer.
    WriteBuffer(Buffer),
    /// Make all completed writes durable.
    Flush,
    /// Discard this number of bytes, so that the cluster can free their space.
    Discard(u64),
    /// Write zeroes. With `thick`, their space stays allocated.
    Zeroes {
        /// Number of bytes to zero.
        len: u64,
        /// Whether the space of the zeroes stays allocated.
        thick: bool,
    },
}

extern "C" fn changed(watch: *mut c_void) {
    // SAFETY: the box of `Image::watch`, which is there until the library has ended the watch.
    let watch = unsafe { &*watch.cast::<Watch>() };
    (watch.0)();
}

extern "C" fn ended(completion: Handle, pending: *mut c_void) {
    // SAFETY: the box that `Image::start` gave to this completion, which ends once.
    let pending = unsafe { Box::from_raw(pending.cast::<Pending>()) };
    let Pending {
        functions,
        buffer,
        done,
        _image,
    } = *pending;
    // SAFETY: the completion that has ended, and is not released yet.
    let answer = unsafe { (functions.rbd_aio_get_return_value)(completion) };
    // SAFETY: as before; it is not used any more.
    unsafe { (functions.rbd_aio_release)(completion) };
    done(answer, buffer);
    drop_last(_image);
}

/// Drops one's part of an image. The last one closes it, which waits for the cluster: not on this
/// thread, which may be a worker's or the library's own.
pub fn drop_last(image: Arc<Image>) {
    if let Some(image) = Arc::into_inner(image) {
        // The library's own code runs in it: not with the small stack of those that only drop.
        let builder = std::thread::Builder::new().name("rbd-close".into());
        let closing = builder.stack_size(STACK).spawn(move || {
            sync::leave_cpu();
            drop(image);
        });
        if let Err(error) = closing {
            tracing::error!("an image of a Ceph cluster is not closed: no thread: {error}");
        }
    }
}

impl Image {
    /// Opens an image of a connected cluster.
    ///
    /// # Errors
    /// The operation that failed, and the library's error.
    pub fn open(
        cluster: Cluster,
        name: &Name,
        read_only: bool,
    ) -> Result<Self, (&'static str, io::Error)> {
        let functions = cluster.functions;
        let failed = |what: &'static str| move |error: io::Error| (what, error);
        let (pool, namespace) = (text(&name.pool), text(&name.namespace));
        let pool = pool.map_err(failed("its pool"))?;
        let namespace = namespace.map_err(failed("its namespace"))?;
        let image = text(&name.image).map_err(failed("its image"))?;
        let snapshot = name.snapshot.as_deref().map(text).transpose();
        let snapshot = snapshot.map_err(failed("its snapshot"))?;
        let mut context = null_mut();
        // SAFETY: a connected client, a string with its end, a place for the handle.
        let answer = unsafe {
            (functions.rados_ioctx_create)(cluster.handle, pool.as_ptr(), &raw mut context)
        };
        check(answer).map_err(failed("its pool"))?;
        // SAFETY: the context that was just made, and a string with its end.
        unsafe { (functions.rados_ioctx_set_namespace)(context, namespace.as_ptr()) };
        let mut handle = null_mut();
        let open = if read_only {
            functions.rbd_open_read_only
        } else {
            functions.rbd_open
        };
        let snapshot = snapshot
            .as_ref()
            .map_or(null(), |snapshot| snapshot.as_ptr());
        // SAFETY: a context, strings with their ends or none, a place for the handle.
        let answer = unsafe { open(context, image.as_ptr(), &raw mut handle, snapshot) };
        if let Err(error) = check(answer) {
            // SAFETY: the context that was made above, of which nothing was made.
            unsafe { (functions.rados_ioctx_destroy)(context) };
            return Err(("the image", error));
        }
        // Behind all that the libraries have registered so far.
        // SAFETY: a function that is there as long as the program.
        let registered = unsafe { on_exit(process_ends, null_mut()) };
        debug_assert_eq!(registered, 0);
        Ok(Self {
            handle,
            context,
            watch: None,
            cluster,
        })
    }

    fn functions(&self) -> &'static Functions {
        self.cluster.functions
    }

    fn number(&self, ask: unsafe extern "C" fn(Handle, *mut u64) -> c_int) -> io::Result<u64> {
        let mut number = 0;
        // SAFETY: an image that is not closed, and a place for the number.
        check(unsafe { ask(self.handle, &raw mut number) })?;
        Ok(number)
    }

    /// Returns the ID of the image, unique among all images of all clusters.
    ///
    /// # Errors
    /// The library's.
    pub fn id(&self) -> io::Result<String> {
        type Ask = unsafe extern "C" fn(Handle, *mut c_char, libc::size_t) -> c_int;
        let text = |ask: Ask, handle| {
            let mut value = vec![0u8; MAX_VALUE_LEN];
            let place = value.as_mut_ptr().cast::<c_char>();
            // SAFETY: a handle that was not ended, and a place of that length.
            let answer = unsafe { ask(handle, place, MAX_VALUE_LEN - 1) };
            // The length of the text, or zero.
            check(answer.min(0))?;
            let value = CStr::from_bytes_until_nul(&value).unwrap_or_default();
            Ok::<_, io::Error>(value.to_string_lossy().into_owned())
        };
        let functions = self.functions();
        let cluster = text(functions.rados_cluster_fsid, self.cluster.handle)?;
        let image = text(functions.rbd_get_id, self.handle)?;
        Ok(format!("{cluster}/{image}"))
    }

    /// Returns the size in bytes. May ask the cluster.
    ///
    /// # Errors
    /// The library's.
    pub fn size(&self) -> io::Result<u64> {
        self.number(self.functions().rbd_get_size)
    }

    /// Returns the feature bits of the image (`RBD_FEATURE_*`).
    ///
    /// # Errors
    /// The library's.
    pub fn features(&self) -> io::Result<u64> {
        self.number(self.functions().rbd_get_features)
    }

    /// Resizes the image to `bytes` bytes, blocking.
    ///
    /// # Errors
    /// The library's.
    pub fn resize(&self, bytes: u64) -> io::Result<()> {
        // SAFETY: an image that is not closed.
        check(unsafe { (self.functions().rbd_resize)(self.handle, bytes) })
    }

    /// Acquires the exclusive lock of the image permanently, and waits for it. A living client that
    /// holds the lock is asked to release it.
    ///
    /// # Errors
    /// The error of librbd: `EROFS` or `EBUSY`, if another client keeps the lock.
    pub fn lock(&self) -> io::Result<()> {
        // SAFETY: an image that is not closed.
        check(unsafe { (self.functions().rbd_lock_acquire)(self.handle, EXCLUSIVE) })
    }

    /// Releases the exclusive lock of the image.
    ///
    /// # Errors
    /// The library's.
    pub fn unlock(&self) -> io::Result<()> {
        // SAFETY: an image that is not closed.
        check(unsafe { (self.functions().rbd_lock_release)(self.handle) })
    }

    /// Returns whether this client has the exclusive lock of the image.
    ///
    /// # Errors
    /// The library's.
    pub fn has_lock(&self) -> io::Result<bool> {
        let mut is_owner = 0;
        // SAFETY: an image that is not closed, and a place for the answer.
        check(unsafe {
            (self.functions().rbd_is_exclusive_lock_owner)(self.handle, &raw mut is_owner)
        })?;
        Ok(is_owner != 0)
    }

    /// Returns the owner of the lock, by the library's name of the client.
    ///
    /// # Errors
    /// The library's.
    pub fn lock_owner(&self) -> io::Result<Option<String>> {
        let (mut mode, mut owner, mut count) = (0, null_mut::<c_char>(), 1);
        // SAFETY: an image that is not closed, and places for one owner.
        let answer = unsafe {
            (self.functions().rbd_lock_get_owners)(
                self.handle,
                &raw mut mode,
                &raw mut owner,
                &raw mut count,
            )
        };
        match check(answer) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            answer => answer?,
        }
        if count == 0 || owner.is_null() {
            return Ok(None);
        }
        // SAFETY: a string with its end, which is the caller's until it is cleaned up.
        let text = unsafe { CStr::from_ptr(owner) }
            .to_string_lossy()
            .into_owned();
        // SAFETY: the list that the call above has made, and is not used any more.
        unsafe { (self.functions().rbd_lock_get_owners_cleanup)(&raw mut owner, count) };
        Ok(Some(text))
    }

    /// Returns the clients that watch the image's header, with their numbers and addresses. They
    /// have the image open and are alive, or were half a minute ago.
    ///
    /// # Errors
    /// The library's.
    pub fn watchers(&self) -> io::Result<Vec<(i64, String)>> {
        let nobody = Watcher {
            address: null_mut(),
            client: 0,
            cookie: 0,
        };
        let mut list = vec![nobody; MAX_WATCHERS];
        let mut count = list.len();
        // SAFETY: an image that is not closed, and places for so many.
        check(unsafe {
            (self.functions().rbd_watchers_list)(self.handle, list.as_mut_ptr(), &raw mut count)
        })?;
        let text = |address: *mut c_char| {
            if address.is_null() {
                String::new()
            } else {
                // SAFETY: a string with its end, which is the caller's until it is cleaned up.
                unsafe { CStr::from_ptr(address) }
                    .to_string_lossy()
                    .into_owned()
            }
        };
        let watchers = list.iter().take(count);
        let watchers = watchers
            .map(|watcher| (watcher.client, text(watcher.address)))
            .collect();
        // SAFETY: the list that the call above has made, and is not used any more.
        unsafe { (self.functions().rbd_watchers_list_cleanup)(list.as_mut_ptr(), count) };
        Ok(watchers)
    }

    /// Takes the lock from a client, which the cluster serves no more from then on (blocklist).
    ///
    /// # Errors
    /// The library's.
    pub fn break_lock(&self, owner: &str) -> io::Result<()> {
        let owner = text(owner)?;
        // SAFETY: an image that is not closed, and a string with its end.
        check(unsafe { (self.functions().rbd_lock_break)(self.handle, EXCLUSIVE, owner.as_ptr()) })
    }

    /// Returns a metadatum of the image.
    ///
    /// # Errors
    /// The library's: `ENOENT`, if there is none of that name.
    pub fn metadatum(&self, name: &str) -> io::Result<String> {
        let name = text(name)?;
        let (mut value, mut len) = (vec![0u8; MAX_VALUE_LEN], MAX_VALUE_LEN - 1);
        let place = value.as_mut_ptr().cast::<c_char>();
        // SAFETY: an image that is not closed, a string with its end, a place of that length.
        check(unsafe {
            (self.functions().rbd_metadata_get)(self.handle, name.as_ptr(), place, &raw mut len)
        })?;
        let value = CStr::from_bytes_until_nul(&value).unwrap_or_default();
        Ok(value.to_string_lossy().into_owned())
    }

    /// Sets a value of the image's metadata.
    ///
    /// # Errors
    /// The library's.
    pub fn set_metadatum(&self, name: &str, value: &str) -> io::Result<()> {
        let (name, value) = (text(name)?, text(value)?);
        // SAFETY: an image that is not closed, and strings with their ends.
        check(unsafe {
            (self.functions().rbd_metadata_set)(self.handle, name.as_ptr(), value.as_ptr())
        })
    }

    /// Registers `call`, which threads of the library call when the image's header changes.
    ///
    /// # Errors
    /// The library's.
    pub fn watch(&mut self, call: impl Fn() + Send + Sync + 'static) -> io::Result<()> {
        let watch = Box::new(Watch(Box::new(call)));
        let mut number = 0;
        let place = (&raw const *watch).cast_mut().cast();
        // SAFETY: an image that is not closed; the box stays where it is until `drop` has ended the
        // watch.
        check(unsafe {
            (self.functions().rbd_update_watch)(self.handle, &raw mut number, changed, place)
        })?;
        self.watch = Some((number, watch));
        Ok(())
    }

    /// Starts a request; `done` is called when it has ended, perhaps before this returns.
    ///
    /// # Errors
    /// The library's, if the request was not started; `done` is never called then.
    pub fn start(
        self: &Arc<Self>,
        offset: u64,
        work: ImageOperation<'_>,
        done: CompletionCallback,
    ) -> io::Result<()> {
        let functions = self.functions();
        let (buffer, work) = match work {
            ImageOperation::Read(buffer) => (Some(buffer), Ready::Read),
            ImageOperation::WriteBuffer(buffer) => (Some(buffer), Ready::WriteBuffer),
            ImageOperation::Write(data) => (None, Ready::Write(data)),
            ImageOperation::Flush => (None, Ready::Flush),
            ImageOperation::Discard(len) => (None, Ready::Discard(len)),
            ImageOperation::Zeroes { len, thick } => (None, Ready::Zeroes(len, thick)),
        };
        let pending = Box::into_raw(Box::new(Pending {
            functions,
            buffer,
            done,
            _image: self.clone(),
        }));
        let mut completion = null_mut();
        // SAFETY: `ended` takes the box of this completion.
        let made = check(unsafe {
            (functions.rbd_aio_create_completion)(pending.cast(), ended, &raw mut completion)
        });
        let started = made.and_then(|()| {
            // SAFETY: the box that was just made, which nobody else has yet; its buffer stays where
            // it is until it has ended.
            let buffer = unsafe { &mut (*pending).buffer };
            let started = self.hand_over(offset, &work, buffer.as_deref_mut(), completion);
            if started.is_err() {
                // SAFETY: it was not started, and nobody has it.
                unsafe { (functions.rbd_aio_release)(completion) };
            }
            started
        });
        if started.is_err() {
            // SAFETY: the box from above: `ended` is never called with it.
            drop(unsafe { Box::from_raw(pending) });
        }
        started
    }

    fn hand_over(
        &self,
        offset: u64,
        work: &Ready<'_>,
        buffer: Option<&mut [u8]>,
        completion: Handle,
    ) -> io::Result<()> {
        let (functions, image) = (self.functions(), self.handle);
        let none = || io::Error::from(io::ErrorKind::InvalidInput);
        check(match *work {
            Ready::Read => {
                let buffer = buffer.ok_or_else(none)?;
                let (at, len) = (buffer.as_mut_ptr().cast(), buffer.len());
                // SAFETY: an image that is not closed; the buffer is the completion's until it has
                // ended.
                unsafe { (functions.rbd_aio_read)(image, offset, len, at, completion) }
            }
            Ready::WriteBuffer => {
                let buffer = buffer.ok_or_else(none)?;
                let (at, len) = (buffer.as_ptr().cast(), buffer.len());
                // SAFETY: as before.
                unsafe { (functions.rbd_aio_write)(image, offset, len, at, completion) }
            }
            Ready::Write(data) => {
                let count = c_int::try_from(data.count()).map_err(|_| none())?;
                let vectors = data.as_iovecs();
                // SAFETY: the list keeps its memory mapped during the call, in which the library
                // copies it (`rbd_disable_zero_copy_writes`, which `connect` has set).
                unsafe { (functions.rbd_aio_writev)(image, vectors, count, offset, completion) }
            }
            // SAFETY: an image that is not closed.
            Ready::Flush => unsafe { (functions.rbd_aio_flush)(image, completion) },
            // SAFETY: as before.
            Ready::Discard(len) => unsafe {
                (functions.rbd_aio_discard)(image, offset, len, completion)
            },
            Ready::Zeroes(len, thick) => {
                let len = usize::try_from(len).map_err(|_| none())?;
                let flags = if thick { THICK } else { 0 };
                // SAFETY: as before.
                unsafe {
                    (functions.rbd_aio_write_zeroes)(image, offset, len, completion, flags, 0)
                }
            }
        })
    }
}

/// [`ImageOperation`] with its buffer moved into the [`Pending`] request.
enum Ready<'a> {
    Read,
    Write(&'a SegmentList),
    WriteBuffer,
    Flush,
    Discard(u64),
    Zeroes(u64, bool),
}

impl Drop for Image {
    /// Closes the image, which waits for the library and the cluster.
    fn drop(&mut self) {
        let functions = self.functions();
        if let Some((number, watch)) = self.watch.take() {
            // SAFETY: an image that is not closed, and a watch of it.
            let ended = unsafe { (functions.rbd_update_unwatch)(self.handle, number) };
            if ended < 0 {
                // The callback may be called once more.
                std::mem::forget(watch);
            }
        }
        // SAFETY: nobody has the image any more: requests in flight have it, too.
        unsafe { (functions.rbd_close)(self.handle) };
        // SAFETY: nothing that was made of it is left.
        unsafe { (functions.rados_ioctx_destroy)(self.context) };
    }
}
