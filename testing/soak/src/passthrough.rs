//! NVMe commands through Linux's driver: `NVME_IOCTL_IO_CMD` (`linux/nvme_ioctl.h`), which answers
//! with the status of the command.
#![allow(unsafe_code)] // The ioctl: its argument has a pointer to the command's data.

use nvme::Status;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::Outcome;

/// `struct nvme_passthru_cmd`, 72 bytes.
#[repr(C)]
#[derive(Default)]
struct Command {
    opcode: u8,
    flags: u8,
    reserved: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10: u32,
    cdw11: u32,
    cdw12: u32,
    cdw13: u32,
    cdw14: u32,
    cdw15: u32,
    timeout_ms: u32,
    result: u32,
}

/// Argument of the ioctl for one command of a block device; the result is the command's status.
struct Submit<'a>(&'a mut Command);

// SAFETY: the request is the one of this structure (`_IOWR('N', 0x43, struct nvme_passthru_cmd)`),
// which the kernel reads and writes during the call.
unsafe impl Ioctl for Submit<'_> {
    type Output = i32;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::read_write::<Command>(b'N', 0x43)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut *self.0).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<i32> {
        Ok(out)
    }
}

/// A namespace as a block device.
pub struct Namespace {
    file: OwnedFd,
    nsid: u32,
}

impl Namespace {
    /// Opens the device at this path; `nsid` is its namespace ID.
    pub fn open(device: &str, nsid: u32) -> Outcome<Namespace> {
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
        let file = rustix::fs::open(device, flags, rustix::fs::Mode::empty())?;
        Ok(Namespace { file, nsid })
    }

    /// The descriptor, past the page cache.
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Executes a command with this opcode, command dword 10 and data for the controller; returns
    /// its status.
    pub fn command<T>(&self, opcode: u8, cdw10: u32, data: &T) -> Result<Status, Errno>
    where
        T: FromBytes + IntoBytes + Immutable,
    {
        // The kernel's prototype has no constant data.
        let mut bytes = data.as_bytes().to_vec();
        let mut command = Command {
            opcode,
            nsid: self.nsid,
            cdw10,
            addr: bytes.as_mut_ptr() as u64,
            data_len: bytes.len() as u32,
            ..Command::default()
        };
        // SAFETY: `addr` and `data_len` name memory that lives until the call returns, when the
        // kernel has no use for it any more.
        let status = unsafe { ioctl(&self.file, Submit(&mut command)) }?;
        Ok(Status::from_bits(status as u16))
    }
}
