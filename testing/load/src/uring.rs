//! Load directly on a file through io_uring, for comparison with a controller on that file. The
//! ring is used in the way in which fio's engine performs best (a registered file, registered
//! buffers, deferred task work). Completions are polled in user space, which is faster than fio's
//! waiting in the kernel; [`Lane::wait`] waits like fio.
//!
//! Safety invariant: the kernel writes only into the lane's own buffers, and a lane waits for its
//! I/Os before these are freed.
#![allow(unsafe_code)]

use crate::lane::{Geometry, IoResult, Lane, Target};
use anyhow::{Context, Result, bail};
use dma::Memory;
use driver::MemorySource;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sync::Unpoisoned;

/// A file or block device as a target of the load, accessed by io_uring.
pub struct UringTarget {
    file: File,
    path: PathBuf,
    size: u64,
    direct: bool,
    register: bool,
    /// Source of the memory for data buffers.
    memory: MemorySource,
    spare: SpareBuffers,
}

/// Buffers of lanes that have ended, reused by later lanes because finding memory may take long.
type SpareBuffers = Arc<Mutex<Vec<Memory>>>;

impl UringTarget {
    /// Opens the file or block device, with `O_DIRECT` where the filesystem supports it.
    pub fn open(path: &Path, write: bool) -> Result<Self> {
        let open = |flags: i32| {
            OpenOptions::new()
                .read(true)
                .write(write)
                .custom_flags(flags)
                .open(path)
        };
        let (file, direct) = match open(rustix::fs::OFlags::DIRECT.bits() as i32) {
            Ok(file) => (file, true),
            Err(_) => (
                open(0).with_context(|| format!("{}", path.display()))?,
                false,
            ),
        };
        let metadata = file.metadata()?;
        let size = if metadata.file_type().is_block_device() {
            std::io::Seek::seek(&mut &file, std::io::SeekFrom::End(0))?
        } else {
            metadata.len()
        };
        Ok(Self {
            file,
            path: path.to_owned(),
            size,
            direct,
            register: true,
            memory: MemorySource::default(),
            spare: SpareBuffers::default(),
        })
    }

    /// Allocates buffers of `len` bytes in total.
    fn buffers(&self, len: usize) -> Result<Memory> {
        let mut spare = self.spare.lock().unpoisoned();
        match spare.iter().position(|memory| memory.len() >= len) {
            Some(at) => Ok(spare.swap_remove(at)),
            None => Ok(self.memory.make(len)?),
        }
    }

    /// Sets the source of memory for the buffers.
    pub fn with_memory(self, memory: MemorySource) -> Self {
        Self { memory, ..self }
    }

    /// Disables the registration of buffers, so that the kernel looks up the pages of each I/O.
    pub fn unregistered(self) -> Self {
        Self {
            register: false,
            ..self
        }
    }
}

impl Target for UringTarget {
    type Lane = UringLane;

    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size,
            block_size: 512,
            description: format!(
                "{}, io_uring, {}",
                self.path.display(),
                if self.direct { "direct" } else { "page cache" }
            ),
        }
    }

    fn lane(&self, _index: u16, depth: u16, bytes: usize) -> Result<UringLane> {
        UringLane::new(
            self.file.try_clone()?,
            depth,
            bytes,
            self.register,
            self.buffers(bytes * usize::from(depth))?,
            self.spare.clone(),
        )
    }
}

/// An io_uring on the file, through which one thread of the load runs its I/O.
pub struct UringLane {
    ring: IoUring,
    /// The file, kept open because it is registered as file 0 of the ring.
    _file: File,
    buffers: Memory,
    /// Pool to which the buffers are returned at the end.
    spare: SpareBuffers,
    bytes: usize,
    /// Whether the data buffers are registered with the ring.
    fixed: bool,
    in_flight: usize,
    unsent: bool,
    /// Whether submitted I/Os deallocate blocks instead of writing them.
    trims: bool,
}

impl UringLane {
    fn new(
        file: File,
        depth: u16,
        bytes: usize,
        register: bool,
        buffers: Memory,
        spare: SpareBuffers,
    ) -> Result<Self> {
        let entries = u32::from(depth).next_power_of_two().max(8);
        let best = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .build(entries);
        let ring = match best {
            Ok(ring) => ring,
            Err(_) => IoUring::new(entries).context("io_uring")?,
        };
        let len = bytes * usize::from(depth);
        let all = buffers.segment(0, len).context("memory is too short")?;
        let submitter = ring.submitter();
        submitter
            .register_files(&[file.as_raw_fd()])
            .context("io_uring: registering the file")?;
        let vector = libc::iovec {
            iov_base: all.as_ptr().cast(),
            iov_len: all.len(),
        };
        // SAFETY: the buffers stay in place as long as the ring: `Drop` waits for all I/Os, and the
        // ring is dropped first.
        let fixed = register && unsafe { submitter.register_buffers(&[vector]) }.is_ok();
        Ok(Self {
            ring,
            _file: file,
            buffers,
            spare,
            bytes,
            fixed,
            in_flight: 0,
            unsent: false,
            trims: false,
        })
    }

    /// Returns the offset of a slot's buffer.
    fn at(&self, slot: u16) -> usize {
        usize::from(slot) * self.bytes
    }

    #[inline]
    fn push(&mut self, slot: u16, entry: squeue::Entry) -> Result<()> {
        let entry = entry.user_data(u64::from(slot));
        // SAFETY: the entry points to this lane's buffers, which stay until its completion has been
        // seen.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            bail!("the ring is full");
        }
        self.in_flight += 1;
        self.unsent = true;
        Ok(())
    }

    fn enter(&mut self, wait: usize) -> Result<()> {
        match self.ring.submit_and_wait(wait) {
            Ok(_) => {
                self.unsent = false;
                Ok(())
            }
            // The next call submits the remaining entries.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(error).context("io_uring_enter"),
        }
    }
}

impl Lane for UringLane {
    #[inline]
    fn submit(&mut self, slot: u16, write: bool, offset: u64) -> Result<()> {
        let Some(buffer) = self.buffers.segment(self.at(slot), self.bytes) else {
            bail!("there is no buffer {slot}");
        };
        let (at, len) = (buffer.as_ptr(), buffer.len() as u32);
        let fd = types::Fixed(0);
        let entry = match (write, self.fixed) {
            (false, true) => opcode::ReadFixed::new(fd, at, len, 0)
                .offset(offset)
                .build(),
            (true, true) => opcode::WriteFixed::new(fd, at, len, 0)
                .offset(offset)
                .build(),
            (false, false) => opcode::Read::new(fd, at, len).offset(offset).build(),
            (true, false) => opcode::Write::new(fd, at, len).offset(offset).build(),
        };
        self.push(slot, entry)
    }

    fn trim(&mut self, slot: u16, offset: u64) -> Result<()> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let entry = opcode::Fallocate::new(types::Fixed(0), self.bytes as u64)
            .offset(offset)
            .mode(mode)
            .build();
        self.trims = true;
        self.push(slot, entry)
    }

    #[inline]
    fn kick(&mut self) -> Result<()> {
        self.enter(0)
    }

    #[inline]
    fn poll(&mut self, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        // A job either reads and writes, or trims; the kernel counts no bytes of a trim.
        let bytes = if self.trims { 0 } else { self.bytes };
        let mut count = 0;
        for entry in self.ring.completion() {
            done(entry.user_data() as u16, outcome(&entry, bytes));
            count += 1;
        }
        self.in_flight = self.in_flight.saturating_sub(count);
        if count == 0 && self.in_flight > 0 && (self.unsent || self.ring.submission().taskrun()) {
            self.enter(0)?;
        }
        Ok(count)
    }

    fn wait(&mut self, _limit: Duration, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        let count = self.poll(done)?;
        if count > 0 || self.in_flight == 0 {
            return Ok(count);
        }
        self.enter(1)?;
        self.poll(done)
    }

    fn put(&mut self, slot: u16, data: &[u8]) {
        // A failed write to the buffer shows when its data is read back.
        let _ = self.buffers.write(self.at(slot), data);
    }

    fn get(&self, slot: u16, data: &mut [u8]) {
        let _ = self.buffers.read(self.at(slot), data);
    }
}

#[inline]
fn outcome(entry: &cqueue::Entry, bytes: usize) -> IoResult {
    match usize::try_from(entry.result()) {
        Ok(n) if n == bytes => Ok(()),
        Ok(n) => Err(format!("only {n} of {bytes} bytes")),
        Err(_) => Err(std::io::Error::from_raw_os_error(-entry.result()).to_string()),
    }
}

impl Drop for UringLane {
    fn drop(&mut self) {
        while self.in_flight > 0 {
            if self.enter(1).is_err() {
                // The kernel may still write to the buffers: they are never freed.
                std::mem::forget(self.buffers.clone());
                return;
            }
            self.in_flight = self
                .in_flight
                .saturating_sub(self.ring.completion().count());
        }
        let mut spare = self.spare.lock().unpoisoned();
        spare.push(self.buffers.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Job, Rw};
    use crate::run;

    #[test]
    fn uring_file_is_written_and_verified() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        for (interrupt, register) in [(false, true), (true, true), (false, false)] {
            let mut target = UringTarget::open(file.path(), true).unwrap();
            assert_eq!(target.geometry().size, 1 << 20);
            if !register {
                target = target.unregistered();
            }
            let job = Job {
                rw: Rw::RandMixed,
                depth: 9,
                ios: Some(2000),
                verify: true,
                interrupt,
                ..Job::default()
            };
            for _ in 0..2 {
                let measured = run(&target, &job, &mut ()).unwrap();
                assert_eq!(measured.read.ios + measured.write.ios, 2000);
                assert!(measured.verified > 200);
            }
            let spare = target.spare.lock().unwrap().len();
            assert_eq!(spare, 1, "the second run has the buffers of the first");
        }
    }

    #[test]
    fn uring_trim_frees_space() {
        use std::os::unix::fs::MetadataExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; 1 << 20]).unwrap();
        let job = Job {
            rw: Rw::Trim,
            depth: 4,
            ios: Some(256),
            ..Job::default()
        };
        let target = UringTarget::open(file.path(), true).unwrap();
        let measured = run(&target, &job, &mut ()).unwrap();
        assert_eq!(measured.trim.ios, 256);
        assert_eq!(file.as_file().metadata().unwrap().len(), 1 << 20);
        assert_eq!(file.as_file().metadata().unwrap().blocks(), 0);
    }

    #[test]
    fn missing_file_is_named() {
        let error = UringTarget::open(Path::new("/no/such/file"), false)
            .err()
            .unwrap();
        assert!(format!("{error:#}").contains("/no/such/file"), "{error:#}");
    }
}
