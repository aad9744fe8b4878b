//! A FUSE file system with a server that falls silent. It answers until a file forbids it. Then it
//! reads every request and answers none, so that a process that accesses it waits, SIGKILL or not
//! (`linux/fuse.h`).
//!
//! The server is a process of its own, which makes no requests to its own file system. When it is
//! killed, its end of the connection closes, and all waiting processes get an error.

use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fuse_disk::{Answer, Mount, Operation, Request, RequestHandler};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Bytes of each file.
const FILE_SIZE: u64 = 64 << 20;
/// Files are named 0 to this, without it.
const FILES: u64 = 1000;
const ENOENT: i32 = 2;

/// Mount point of the file system below a directory.
pub(in crate::hostile) fn mount_point(dir: &Path) -> PathBuf {
    dir.join("fuse")
}

/// Mount point of an overlay of it.
pub(in crate::hostile) fn overlay_point(dir: &Path) -> PathBuf {
    dir.join("overlay")
}

/// While this file is there, nothing is answered.
pub(in crate::hostile) fn silence(dir: &Path) -> PathBuf {
    dir.join("silent")
}

/// Takes both mounts away, if they are there; open files of theirs stay open.
pub(in crate::hostile) fn unmount_all(dir: &Path) {
    for point in [overlay_point(dir), mount_point(dir)] {
        let _ = unmount(point, UnmountFlags::DETACH);
    }
}

/// Server of the files, in the directory that has the file [`silence`].
struct Server(PathBuf);

impl RequestHandler for Server {
    fn accepts(&mut self, _: u32, _: &[u8]) -> bool {
        !self.0.exists()
    }

    fn serve(&mut self, request: &Request<'_>) -> Answer {
        if request.node.number() >= FILES {
            return Answer::Error(ENOENT);
        }
        match request.operation {
            Operation::Size | Operation::Resize(_) => Answer::Cached(FILE_SIZE),
            Operation::Read { offset, len } => {
                let left = FILE_SIZE.saturating_sub(offset).min(len.into());
                Answer::Data(vec![0; left as usize])
            }
            Operation::Write { .. } | Operation::Zero { .. } | Operation::Sync => Answer::Done,
        }
    }
}

/// Mounts the file system, which only root may do, says so, and answers until the connection ends.
pub(in crate::hostile) fn mount_and_serve(dir: &Path) -> Result<()> {
    let mounted = Mount::new(&mount_point(dir)).context("mount of fuse")?;
    println!("ready");
    mounted.serve(&mut Server(silence(dir)));
    Ok(())
}

/// Puts an overlay over the file system, for reading.
pub(in crate::hostile) fn mount_overlay(dir: &Path) -> Result<()> {
    let (point, empty) = (overlay_point(dir), dir.join("empty"));
    fs::create_dir_all(&point)?;
    fs::create_dir_all(&empty)?;
    let lower = mount_point(dir);
    let data = format!("lowerdir={}:{}", lower.display(), empty.display());
    let data = CString::new(data)?;
    let flags = MountFlags::RDONLY;
    mount("overlay", &point, "overlay", flags, data.as_c_str()).context("mount of overlayfs")
}
