//! A FUSE file system with a server that falls silent. It answers until a file forbids it. Then it
//! reads every request and answers none, so that a process that accesses it waits, SIGKILL or not
//! (`linux/fuse.h`).
//!
//! The server is a process of its own, which makes no requests to its own file system. When it is
//! killed, its end of the connection closes, and all waiting processes get an error.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Bytes of each file.
pub(in crate::hostile) const FILE_SIZE: u64 = 64 << 20;
/// The root's node; files have their number and [`FIRST`].
const ROOT: u64 = 1;
const FIRST: u64 = 2;
/// Files are named 0 to this, without it.
const FILES: u64 = 1000;

/// Opcodes.
mod op {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const READDIR: u32 = 28;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const BATCH_FORGET: u32 = 42;
}

const ENOENT: i32 = 2;
const ENOSYS: i32 = 38;
const HEADER: usize = 40;

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

/// A mount that only root may do.
pub(in crate::hostile) struct Server {
    device: File,
    silence: PathBuf,
}

impl Server {
    /// Mounts it.
    pub(in crate::hostile) fn mount(dir: &Path) -> Result<Self> {
        let point = mount_point(dir);
        fs::create_dir_all(&point)?;
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.context("/dev/fuse")?;
        let data = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other",
            device.as_raw_fd()
        );
        let data = CString::new(data)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("vnvme-hostile", &point, "fuse", flags, data.as_c_str()).context("mount of fuse")?;
        Ok(Self {
            device,
            silence: silence(dir),
        })
    }

    /// Answers until the connection ends.
    pub(in crate::hostile) fn serve(mut self) -> Result<()> {
        let mut request = vec![0; (1 << 20) + 0x1000];
        loop {
            let len = match self.device.read(&mut request) {
                Ok(len) => len,
                // A request that was interrupted before it was read (ENOENT).
                Err(error) if error.raw_os_error() == Some(ENOENT) => continue,
                Err(error) => return Err(error.into()),
            };
            let Some(request) = request.get(..len) else {
                continue;
            };
            if !self.silence.exists()
                && let Some(answer) = answer(request)
            {
                // The process that asked may have ended.
                let _ = self.device.write(&answer);
            }
        }
    }
}

fn word(request: &[u8], at: usize) -> u32 {
    let bytes = request.get(at..at + 4).and_then(|b| b.try_into().ok());
    bytes.map_or(0, u32::from_ne_bytes)
}

fn long(request: &[u8], at: usize) -> u64 {
    let bytes = request.get(at..at + 8).and_then(|b| b.try_into().ok());
    bytes.map_or(0, u64::from_ne_bytes)
}

/// The message that answers a request; none where none is expected.
fn answer(request: &[u8]) -> Option<Vec<u8>> {
    let (opcode, unique, node) = (word(request, 4), long(request, 8), long(request, 16));
    let body = match opcode {
        op::FORGET | op::BATCH_FORGET | op::INTERRUPT | op::DESTROY => return None,
        op::INIT => Ok(init(request)),
        op::LOOKUP => lookup(request.get(HEADER..).unwrap_or_default()),
        op::GETATTR | op::SETATTR => Ok([vec![0; 16], attributes(node)].concat()),
        op::OPEN | op::OPENDIR => Ok(vec![0; 16]),
        op::READ => Ok(read(request)),
        op::WRITE => Ok([word(request, HEADER + 16), 0]
            .map(u32::to_ne_bytes)
            .concat()),
        op::STATFS => Ok(statfs()),
        op::RELEASE | op::RELEASEDIR | op::FSYNC | op::FLUSH | op::READDIR => Ok(Vec::new()),
        _ => Err(ENOSYS),
    };
    let (error, body) = match body {
        Ok(body) => (0, body),
        Err(error) => (-error, Vec::new()),
    };
    let mut answer = (16 + body.len() as u32).to_ne_bytes().to_vec();
    answer.extend(error.to_ne_bytes());
    answer.extend(unique.to_ne_bytes());
    answer.extend(body);
    Some(answer)
}

/// `struct fuse_init_out` of version 7.31.
fn init(request: &[u8]) -> Vec<u8> {
    let readahead = word(request, HEADER + 8);
    let mut out: Vec<u8> = [7, 31, readahead, 0].map(u32::to_ne_bytes).concat();
    out.extend([16u16, 12].map(u16::to_ne_bytes).concat());
    out.extend([1u32 << 20, 1].map(u32::to_ne_bytes).concat());
    out.resize(64, 0);
    out
}

/// `struct fuse_entry_out`; nothing may be remembered.
fn lookup(name: &[u8]) -> Result<Vec<u8>, i32> {
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let number = std::str::from_utf8(name).ok().and_then(|n| n.parse().ok());
    let node = FIRST + number.filter(|n: &u64| *n < FILES).ok_or(ENOENT)?;
    let mut out: Vec<u8> = [node, 1, 0, 0, 0].map(u64::to_ne_bytes).concat();
    out.extend(attributes(node));
    Ok(out)
}

/// `struct fuse_attr`.
fn attributes(node: u64) -> Vec<u8> {
    let (size, mode) = match node {
        ROOT => (0, 0o040_755u32),
        _ => (FILE_SIZE, 0o100_666),
    };
    let mut out: Vec<u8> = [node, size, size / 512, 0, 0, 0]
        .map(u64::to_ne_bytes)
        .concat();
    let rest = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0];
    out.extend(rest.map(u32::to_ne_bytes).concat());
    out
}

/// Zeroes, up to the file's end.
fn read(request: &[u8]) -> Vec<u8> {
    let (offset, size) = (long(request, HEADER + 8), word(request, HEADER + 16));
    let left = FILE_SIZE.saturating_sub(offset).min(size.into());
    vec![0; left as usize]
}

/// `struct fuse_kstatfs`.
fn statfs() -> Vec<u8> {
    let mut out: Vec<u8> = [1u64 << 20; 5].map(u64::to_ne_bytes).concat();
    out.extend([4096u32, 255, 4096].map(u32::to_ne_bytes).concat());
    out.resize(80, 0);
    out
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
