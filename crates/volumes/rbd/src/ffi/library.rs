//! The libraries, loaded when the first image is opened, and their functions as C has them
//! (`rados/librados.h`, `rbd/librbd.h`).

use libc::{c_char, c_int, c_void, size_t, ssize_t};
use std::ffi::CStr;
use std::sync::OnceLock;

/// Pointer to an object of librados or librbd: cluster, I/O context, image or completion.
pub(super) type Handle = *mut c_void;

/// Function that a thread of the library calls when a request has ended.
pub(super) type RawCallback = extern "C" fn(Handle, *mut c_void);
/// Called by a thread of the library when an image's header has changed.
pub(super) type Changed = extern "C" fn(*mut c_void);

/// Watcher of an image's header (`rbd_image_watcher_t`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Watcher {
    pub(super) address: *mut c_char,
    pub(super) client: i64,
    pub(super) cookie: u64,
}

/// Defines a structure of function pointers, and the function that looks them up.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// Functions of librados and librbd, found at run time.
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// Looks up all functions in the loaded libraries. The error is the name of a missing
            /// one.
            fn find(libraries: &[Library]) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        let symbol = find(libraries, name).ok_or(stringify!($name))?;
                        // SAFETY: it is the function of that name, which has these arguments in
                        // every version of the library that has it: its interface only grows.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) -> $result,
                            >(symbol)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    rados_create: fn(*mut Handle, *const c_char) -> c_int;
    rados_conf_read_file: fn(Handle, *const c_char) -> c_int;
    rados_conf_set: fn(Handle, *const c_char, *const c_char) -> c_int;
    rados_conf_get: fn(Handle, *const c_char, *mut c_char, size_t) -> c_int;
    rados_connect: fn(Handle) -> c_int;
    rados_cluster_fsid: fn(Handle, *mut c_char, size_t) -> c_int;
    rados_shutdown: fn(Handle) -> ();
    rados_ioctx_create: fn(Handle, *const c_char, *mut Handle) -> c_int;
    rados_ioctx_set_namespace: fn(Handle, *const c_char) -> ();
    rados_ioctx_destroy: fn(Handle) -> ();
    rbd_open: fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_open_read_only: fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_close: fn(Handle) -> c_int;
    rbd_get_id: fn(Handle, *mut c_char, size_t) -> c_int;
    rbd_get_size: fn(Handle, *mut u64) -> c_int;
    rbd_get_features: fn(Handle, *mut u64) -> c_int;
    rbd_resize: fn(Handle, u64) -> c_int;
    rbd_is_exclusive_lock_owner: fn(Handle, *mut c_int) -> c_int;
    rbd_lock_acquire: fn(Handle, c_int) -> c_int;
    rbd_lock_release: fn(Handle) -> c_int;
    rbd_lock_get_owners: fn(Handle, *mut c_int, *mut *mut c_char, *mut size_t) -> c_int;
    rbd_lock_get_owners_cleanup: fn(*mut *mut c_char, size_t) -> ();
    rbd_lock_break: fn(Handle, c_int, *const c_char) -> c_int;
    rbd_watchers_list: fn(Handle, *mut Watcher, *mut size_t) -> c_int;
    rbd_watchers_list_cleanup: fn(*mut Watcher, size_t) -> ();
    rbd_metadata_get: fn(Handle, *const c_char, *mut c_char, *mut size_t) -> c_int;
    rbd_metadata_set: fn(Handle, *const c_char, *const c_char) -> c_int;
    rbd_update_watch: fn(Handle, *mut u64, Changed, *mut c_void) -> c_int;
    rbd_update_unwatch: fn(Handle, u64) -> c_int;
    rbd_aio_create_completion: fn(*mut c_void, RawCallback, *mut Handle) -> c_int;
    rbd_aio_get_return_value: fn(Handle) -> ssize_t;
    rbd_aio_release: fn(Handle) -> ();
    rbd_aio_read: fn(Handle, u64, size_t, *mut c_char, Handle) -> c_int;
    rbd_aio_write: fn(Handle, u64, size_t, *const c_char, Handle) -> c_int;
    rbd_aio_writev: fn(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd_aio_flush: fn(Handle, Handle) -> c_int;
    rbd_aio_discard: fn(Handle, u64, u64, Handle) -> c_int;
    rbd_aio_write_zeroes: fn(Handle, u64, size_t, Handle, c_int, c_int) -> c_int;
}

/// A library that stays loaded until the process ends: its threads may run its code until then.
struct Library(*mut c_void);

/// Reason why librados and librbd cannot be loaded.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LibraryError {
    /// A library file is missing or cannot be loaded.
    #[error(
        "{name} cannot be loaded ({why}); install the package librbd1 (Debian, Ubuntu: apt install librbd1; others: dnf install librbd1)"
    )]
    Missing {
        /// File name of the library.
        name: &'static str,
        /// Error message of the dynamic linker.
        why: String,
    },
    /// The library is too old, because it lacks a function.
    #[error("librbd has no {function}; install a newer one (Ceph 16 or later)")]
    Old {
        /// Name of the function that the library lacks.
        function: &'static str,
    },
}

/// Environment variable with the folder of the libraries, instead of the system's search path: for
/// tests, and for libraries in other places.
pub const LIBRARY_PATH: &str = "VNVME_LIBRBD";

fn load(file: &'static str) -> Result<Library, LibraryError> {
    let folder = std::env::var_os(LIBRARY_PATH);
    let path = match folder {
        Some(folder) => std::path::PathBuf::from(folder).join(file),
        None => file.into(),
    };
    let missing = |why: String| LibraryError::Missing { name: file, why };
    let name = std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str());
    let name = std::ffi::CString::new(name).map_err(|error| missing(error.to_string()))?;
    // SAFETY: a string with its end; the library's initialisers run, which do nothing but set up
    // the library.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if library.is_null() {
        // SAFETY: without arguments; the text belongs to this thread until its next call.
        let text = unsafe { libc::dlerror() };
        if text.is_null() {
            return Err(missing("for no reason that was given".into()));
        }
        // SAFETY: a string with its end, see above.
        let text = unsafe { CStr::from_ptr(text) };
        return Err(missing(text.to_string_lossy().into_owned()));
    }
    Ok(Library(library))
}

fn find(libraries: &[Library], name: &str) -> Option<*mut c_void> {
    libraries.iter().find_map(|Library(library)| {
        // SAFETY: a loaded library and a string with its end.
        let symbol = unsafe { libc::dlsym(*library, name.as_ptr().cast()) };
        (!symbol.is_null()).then_some(symbol)
    })
}

/// Functions of the libraries, loaded once for the process.
static FUNCTIONS: OnceLock<Result<Functions, LibraryError>> = OnceLock::new();

/// Returns the functions of the libraries, which the first call loads.
pub(super) fn functions() -> Result<&'static Functions, LibraryError> {
    #[cfg(test)]
    return Ok(&super::fake::FUNCTIONS);
    #[cfg(not(test))]
    loaded()
}

#[cfg_attr(test, allow(dead_code))]
fn loaded() -> Result<&'static Functions, LibraryError> {
    let loaded = FUNCTIONS.get_or_init(|| {
        let libraries = [load("librados.so.2")?, load("librbd.so.1")?];
        Functions::find(&libraries).map_err(|function| LibraryError::Old { function })
    });
    loaded.as_ref().map_err(Clone::clone)
}
