//! Attempts at files, by system calls and by rings.

use crate::*;

pub fn read_file() -> io::Result<()> {
    File::open(place("there/file")).map(drop)
}

pub fn read_passwd() -> io::Result<()> {
    File::open("/etc/passwd").map(drop)
}

pub fn write_file() -> io::Result<()> {
    File::options()
        .append(true)
        .open(place("there/file"))
        .map(drop)
}

pub fn truncate_file() -> io::Result<()> {
    let path = std::ffi::CString::new(place("there/file").into_os_string().into_encoded_bytes());
    let path = path.unwrap();
    // SAFETY: the path ends with a NUL byte.
    answer(unsafe { libc::truncate(path.as_ptr(), 0) }.into())
}

pub fn create_file() -> io::Result<()> {
    File::create(place("there/new")).map(drop)
}

pub fn make_directory() -> io::Result<()> {
    fs::create_dir(place("there/directory"))
}

pub fn list_directory() -> io::Result<()> {
    fs::read_dir(place("there")).map(drop)
}

pub fn rename_file() -> io::Result<()> {
    fs::rename(place("there/file"), place("there/other"))
}

pub fn remove_elsewhere() -> io::Result<()> {
    fs::remove_file(place("there/file"))
}

pub fn remove_where_allowed() -> io::Result<()> {
    fs::remove_file(place("removable/file"))
}

pub fn read_where_allowed() -> io::Result<()> {
    File::open(place("removable/file")).map(drop)
}

pub fn read_where_it_may() -> io::Result<()> {
    File::open(place("readable/file")).map(drop)
}

pub fn write_where_it_may_read() -> io::Result<()> {
    let file = place("readable/file");
    File::options().append(true).open(file).map(drop)
}

pub fn socket_where_allowed() -> io::Result<()> {
    let path = place("removable/socket");
    std::os::unix::net::UnixListener::bind(path).map(drop)
}

pub fn later_read() -> io::Result<()> {
    File::open(place("open/inside/file")).map(drop)
}

pub fn append(name: &str) -> io::Result<()> {
    File::options().append(true).open(place(name)).map(drop)
}

pub fn later_write() -> io::Result<()> {
    append("open/file")
}

pub fn later_create() -> io::Result<()> {
    File::create(place("open/inside/new")).map(drop)
}

pub fn later_replace() -> io::Result<()> {
    fs::rename(place("open/file"), place("open/other"))
}

pub fn later_remove() -> io::Result<()> {
    fs::remove_file(place("open/file"))
}

pub fn later_list() -> io::Result<()> {
    fs::read_dir(place("open/inside")).map(drop)
}

pub fn later_listen() -> io::Result<()> {
    UnixListener::bind(place("open/socket")).map(drop)
}

pub fn later_listen_outside() -> io::Result<()> {
    UnixListener::bind(place("there/socket")).map(drop)
}

pub fn later_connect() -> io::Result<()> {
    let _listener = UnixListener::bind(place("open/socket"))?;
    UnixStream::connect(place("open/socket")).map(drop)
}

pub fn later_read_one() -> io::Result<()> {
    File::open(place("one/file")).map(drop)
}

pub fn later_read_beside() -> io::Result<()> {
    File::open(place("one/beside")).map(drop)
}

pub fn later_read_link() -> io::Result<()> {
    File::open(place("open/link")).map(drop)
}

pub fn later_write_link() -> io::Result<()> {
    append("open/link")
}

pub fn later_read_dots() -> io::Result<()> {
    File::open(place("open/inside/../../there/file")).map(drop)
}

pub fn later_write_dots() -> io::Result<()> {
    append("open/../there/file")
}

pub fn later_move_out() -> io::Result<()> {
    fs::rename(place("open/file"), place("readable/out"))
}

pub fn later_move_in() -> io::Result<()> {
    fs::rename(place("there/file"), place("open/in"))
}

pub fn later_move() -> io::Result<()> {
    fs::rename(place("open/file"), place("open/inside/file"))
}

pub fn later_link_in() -> io::Result<()> {
    fs::hard_link(place("there/file"), place("open/in"))
}

pub fn later_symlink() -> io::Result<()> {
    std::os::unix::fs::symlink("/etc", place("open/etc"))
}

pub fn later_directory() -> io::Result<()> {
    fs::create_dir(place("open/directory"))
}

pub fn make_node(kind: rustix::fs::FileType) -> io::Result<()> {
    use rustix::fs::{CWD, Mode, mknodat};
    Ok(mknodat(CWD, place("open/node"), kind, Mode::RUSR, 0)?)
}

pub fn later_fifo() -> io::Result<()> {
    make_node(rustix::fs::FileType::Fifo)
}

/// The one of overlayfs, which anybody may make.
pub fn later_device() -> io::Result<()> {
    make_node(rustix::fs::FileType::CharacterDevice)
}

pub fn later_read_only() -> io::Result<()> {
    File::open(place("look/file")).map(drop)?;
    fs::read_dir(place("look")).map(drop)
}

pub fn later_write_read_only() -> io::Result<()> {
    append("look/file")
}

pub fn later_create_read_only() -> io::Result<()> {
    File::create(place("look/new")).map(drop)
}

pub fn later_remove_read_only() -> io::Result<()> {
    fs::remove_file(place("look/file"))
}

pub fn later_owner() -> io::Result<()> {
    std::os::unix::fs::chown(place("open/file"), None, None)
}

pub fn mode(bits: u32) -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(bits)
}

pub fn later_mode_by_path() -> io::Result<()> {
    fs::set_permissions(place("open/file"), mode(0o666))
}

pub fn later_mode() -> io::Result<()> {
    File::open(place("open/file"))?.set_permissions(mode(0o640))
}

/// Anyone executing the file would have this user's rights.
pub fn later_set_user() -> io::Result<()> {
    File::open(place("open/file"))?.set_permissions(mode(0o4755))
}

pub fn later_datagrams() -> io::Result<()> {
    std::os::unix::net::UnixDatagram::unbound().map(drop)
}

pub fn execute() -> io::Result<()> {
    Command::new("/bin/true").status().map(drop)
}

pub fn execute_here() -> io::Result<()> {
    use std::os::unix::process::CommandExt;
    Err(Command::new("/bin/sh").args(["-c", "exit 200"]).exec())
}

pub fn read_in_thread() -> io::Result<()> {
    std::thread::spawn(read_file).join().unwrap()
}

/// An openat by a ring that is made here, as a worker's is.
pub fn by_ring(mut ring: IoUring, flags: squeue::Flags) -> io::Result<()> {
    let path = std::ffi::CString::new("/etc/passwd").unwrap();
    let open = opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path.as_ptr()).flags(libc::O_RDONLY);
    let entry = open.build().flags(flags);
    // SAFETY: the path lives until the answer is there.
    unsafe { ring.submission().push(&entry) }.unwrap();
    ring.submit_and_wait(1)?;
    let result = ring.completion().next().unwrap().result();
    match result {
        0.. => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

pub fn read_by_ring() -> io::Result<()> {
    by_ring(IoUring::new(4)?, squeue::Flags::empty())
}

pub fn read_by_ring_worker() -> io::Result<()> {
    by_ring(IoUring::new(4)?, squeue::Flags::ASYNC)
}

pub fn read_by_polled_ring() -> io::Result<()> {
    by_ring(
        IoUring::builder().setup_sqpoll(10).build(4)?,
        squeue::Flags::empty(),
    )
}
