//! A disk's life: made or taken over, served, resized, stopped.

use crate::control::{Control, open_device};
use crate::queue::Queue;
use crate::stats::{DiskStats, QueueStats};
use crate::sys::QueueRing;
use crate::uapi::{self, DevInfo};
use crate::{UblkError, params};
use dma::Memory;
use std::any::Any;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use volume::{Io, IoOptions, Limits, PinnedMemory, Volume};
use worker::IdleWindow;

/// Largest request, in bytes: each tag has a buffer of that size.
pub const MAX_IO: u64 = 512 << 10;
/// Queues that a disk can have here, one thread each.
const QUEUES: std::ops::RangeInclusive<u16> = 1..=64;
/// How long the end of a server may go unnoticed by the kernel.
const NOTICE: Duration = Duration::from_secs(10);
/// How long to wait for others who have the device open, when it is removed.
const OTHERS: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// How a disk is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskOptions {
    /// Its number, N of `/dev/ublkbN`; the kernel chooses one where none is given.
    pub id: Option<u32>,
    /// Queues, 1 to 64: one thread each.
    pub queues: u16,
    /// Requests of each queue, 1 to 4096.
    pub depth: u16,
    /// Logical block size in bytes; the volume's, 512 at least, where none is given.
    pub block_size: Option<u32>,
    /// When this process is killed, the disk waits for the next one that is started with the same number; it does again
    /// what this one had not finished. Without it, the disk goes with the process.
    pub recover: bool,
    /// How long each queue's thread polls after its last request.
    pub idle_window: IdleWindow,
    /// The kernel pins the queues' buffers for requests to files and block devices (io_uring's fixed buffers).
    pub pin_memory: bool,
    /// A thread of the kernel takes each queue's requests to files and block devices (io_uring's SQPOLL).
    pub sqpoll: bool,
}

impl Default for DiskOptions {
    fn default() -> Self {
        Self {
            id: None,
            queues: 1,
            depth: 128,
            block_size: None,
            recover: false,
            idle_window: IdleWindow::default(),
            pin_memory: false,
            sqpoll: false,
        }
    }
}

impl DiskOptions {
    /// Of the ring to the volume that a queue of this depth has.
    fn io(&self, depth: u16) -> IoOptions {
        IoOptions {
            capacity: u32::from(depth) + 1,
            fixed_buffers: self.pin_memory,
            sqpoll: self.sqpoll,
            ..IoOptions::default()
        }
    }

    fn check(&self) -> Result<(), UblkError> {
        let what = if !QUEUES.contains(&self.queues) {
            format!("a ublk device has 1 to {} queues", QUEUES.end())
        } else if !(1..=uapi::MAX_DEPTH).contains(&self.depth) {
            format!("a queue has a depth from 1 to {}", uapi::MAX_DEPTH)
        } else if self.recover && self.id.is_none() {
            "recovery needs a number, by which the next process finds the disk".into()
        } else {
            return Ok(());
        };
        Err(UblkError::Options { what })
    }
}

/// A disk that is served. [`Disk::stop`] takes it away, and so does dropping it, without telling of errors.
pub struct Disk {
    id: u32,
    control: Control,
    volume: Arc<dyn Volume>,
    /// As the kernel knows it, in bytes.
    size: u64,
    stats: Arc<DiskStats>,
    threads: Vec<JoinHandle<()>>,
    /// Keeps the queues' memory known to devices below, until the threads have ended.
    registrations: Vec<Box<dyn Any + Send>>,
    stopped: bool,
}

/// What a queue's thread needs.
struct Setup {
    number: u16,
    info: DevInfo,
    options: DiskOptions,
    device: Arc<OwnedFd>,
    memory: Memory,
    volume: Arc<dyn Volume>,
    stats: Arc<DiskStats>,
    ready: Sender<Result<(), UblkError>>,
}

impl Disk {
    /// Makes a disk of the volume, or takes over the one of that number whose server was killed. `register` makes a
    /// queue's memory known to devices below the volume; what it returns is kept as long as the memory is used.
    ///
    /// # Errors
    /// [`UblkError`].
    pub fn start(
        volume: Arc<dyn Volume>,
        options: DiskOptions,
        register: &mut dyn FnMut(&Memory) -> Box<dyn Any + Send>,
    ) -> Result<Self, UblkError> {
        options.check()?;
        let told = volume.info();
        let block_size = params::block_size(&told, options.block_size)?;
        let mut control = Control::open()?;
        let left = match options.id {
            Some(id) => left_over(&mut control, id, options.recover)?,
            None => None,
        };
        let recovered = left.is_some();
        let params = params::params(&told, block_size);
        let info = match left {
            Some(info) => {
                let id = info.dev_id;
                let before = control.params(id)?;
                let wrong = |what: String| UblkError::Shape { id, what };
                if before.logical_bs_shift != params.logical_bs_shift {
                    let bytes = 1u64 << before.logical_bs_shift.min(63);
                    return Err(wrong(format!("blocks of {bytes} bytes")));
                }
                if before.dev_sectors > params.dev_sectors {
                    let bytes = before.dev_sectors.saturating_mul(512);
                    return Err(wrong(format!("{bytes} bytes")));
                }
                control.begin_recovery(id)?;
                info
            }
            None => {
                let info = control.add(options.id, wanted(&options, control.features))?;
                if let Err(error) = control.set_params(info.dev_id, params) {
                    let _ = control.delete(info.dev_id);
                    return Err(error);
                }
                info
            }
        };
        let id = info.dev_id;
        let mut disk = Self {
            id,
            size: told.size,
            stats: Arc::new(DiskStats {
                id,
                queues: (0..info.nr_hw_queues)
                    .map(|_| QueueStats::default())
                    .collect(),
            }),
            control,
            volume,
            threads: Vec::new(),
            registrations: Vec::new(),
            stopped: false,
        };
        disk.serve(&info, options, register)?;
        let threads = &disk.threads;
        let mut sensible = || !threads.iter().any(JoinHandle::is_finished);
        disk.control.start(id, recovered, &mut sensible)?;
        tracing::info!(
            device = format_args!("/dev/ublkb{id}"),
            bytes = told.size,
            queues = info.nr_hw_queues,
            depth = info.queue_depth,
            recovered,
            "block device"
        );
        Ok(disk)
    }

    /// Starts the queues' threads, and waits until all of them fetch.
    fn serve(
        &mut self,
        info: &DevInfo,
        options: DiskOptions,
        register: &mut dyn FnMut(&Memory) -> Box<dyn Any + Send>,
    ) -> Result<(), UblkError> {
        let device = Arc::new(open_device(self.id)?);
        let (ready, readies) = mpsc::channel();
        for number in 0..info.nr_hw_queues {
            let bytes = usize::from(info.queue_depth) * info.max_io_buf_bytes as usize;
            let memory = Memory::anonymous(bytes)?;
            self.registrations.push(register(&memory));
            let setup = Setup {
                options,
                number,
                info: *info,
                device: device.clone(),
                memory,
                volume: self.volume.clone(),
                stats: self.stats.clone(),
                ready: ready.clone(),
            };
            let builder = std::thread::Builder::new().name(format!("ublk{}-{number}", self.id));
            let thread = builder.spawn(move || serve(setup));
            self.threads
                .push(thread.map_err(UblkError::system("a queue's thread"))?);
        }
        drop(ready);
        // One that ends without a word is noticed when the device is started.
        readies.into_iter().collect()
    }

    /// The device's number: N of `/dev/ublkbN`.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Its counters.
    pub fn stats(&self) -> Arc<DiskStats> {
        self.stats.clone()
    }

    /// All queues are served. They end by themselves when the kernel takes the device away, or by an error.
    pub fn is_alive(&self) -> bool {
        !self.threads.iter().any(JoinHandle::is_finished)
    }

    /// Tells the kernel the volume's size, where it has another one since [`Volume::refresh`] was
    /// called last, which is left to the caller. `true` when the kernel was told.
    ///
    /// # Errors
    /// [`UblkError`].
    pub fn resize(&mut self) -> Result<bool, UblkError> {
        let size = self.volume.info().size;
        if size == self.size || size < 512 {
            return Ok(false);
        }
        self.size = size;
        let told = self.control.resize(self.id, size)?;
        let device = format_args!("/dev/ublkb{}", self.id);
        if told {
            tracing::info!(%device, bytes = size, "resized");
        } else {
            tracing::warn!(%device, bytes = size, "the kernel cannot resize ublk devices");
        }
        Ok(told)
    }

    /// Takes the disk away: what the block layer still has is written, then everything is made durable.
    ///
    /// # Errors
    /// [`UblkError`].
    pub fn stop(mut self) -> Result<(), UblkError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), UblkError> {
        if std::mem::replace(&mut self.stopped, true) {
            return Ok(());
        }
        // What the block layer still has is to be written soon.
        if let Some(limits) = self.volume.limits() {
            limits.set(Limits::default());
        }
        let stopped = self.control.stop(self.id);
        let mut failed = false;
        for thread in self.threads.drain(..) {
            failed |= thread.join().is_err();
        }
        self.registrations.clear();
        stopped?;
        // Others who have it open still may keep it for long: it goes when they go.
        let deadline = Instant::now() + OTHERS;
        if !self
            .control
            .delete_before(self.id, &mut || Instant::now() < deadline)?
        {
            tracing::warn!(
                "/dev/ublkb{}: still open somewhere, it goes when it is closed",
                self.id
            );
        }
        if failed {
            return Err(UblkError::QueueEnded { id: self.id });
        }
        Ok(())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!(%error, "ublk device {}", self.id);
        }
    }
}

fn wanted(options: &DiskOptions, features: u64) -> DevInfo {
    let mut flags = uapi::F_CMD_IOCTL_ENCODE | uapi::F_UPDATE_SIZE;
    if options.recover {
        flags |= uapi::F_USER_RECOVERY | uapi::F_USER_RECOVERY_REISSUE;
    }
    DevInfo {
        nr_hw_queues: options.queues,
        queue_depth: options.depth,
        max_io_buf_bytes: MAX_IO as u32,
        flags: flags & features,
        ..DevInfo::default()
    }
}

/// What an earlier server left under this number: cleared away, or to be recovered.
fn left_over(control: &mut Control, id: u32, recover: bool) -> Result<Option<DevInfo>, UblkError> {
    let deadline = Instant::now() + NOTICE;
    while let Some(info) = control.info(id)? {
        match info.state {
            uapi::STATE_QUIESCED if recover => return Ok(Some(info)),
            uapi::STATE_LIVE => {
                let pid = info.ublksrv_pid;
                if Path::new(&format!("/proc/{pid}")).exists() || Instant::now() > deadline {
                    return Err(UblkError::InUse { id, pid });
                }
                // Killed a moment ago; the kernel is about to notice.
                std::thread::sleep(PAUSE);
            }
            _ => {
                control.stop(id)?;
                control.delete(id)?;
            }
        }
    }
    Ok(None)
}

/// Takes away a disk that a killed process left, waiting for recovery or not.
///
/// # Errors
/// [`UblkError`]: it is served, among others.
pub fn remove(id: u32) -> Result<(), UblkError> {
    let mut control = Control::open()?;
    left_over(&mut control, id, false).map(drop)
}

/// Pins a queue's buffers for the requests of its ring, where that was asked for. Nobody has a request in them yet.
fn pin(io: &Io, memory: &Memory) -> Option<PinnedMemory> {
    io.pinner()?.pin(memory, 0, memory.len() as u64)
}

/// A queue's thread.
fn serve(setup: Setup) {
    let number = setup.number;
    let Some(stats) = setup.stats.queues.get(usize::from(number)) else {
        return;
    };
    let (info, ready) = (setup.info, setup.ready);
    let made = || -> Result<Queue<'_>, UblkError> {
        let io = Io::new(setup.options.io(info.queue_depth));
        let volume = setup.volume.open(&io)?;
        let pinned = pin(&io, &setup.memory);
        let bytes = u64::from(info.max_io_buf_bytes);
        let ring = QueueRing::new(setup.device, number, info.queue_depth, setup.memory, bytes);
        let ring = ring.map_err(UblkError::system("a queue's ring"))?;
        let mut queue = Queue::new(ring, volume, io, pinned, info.queue_depth, stats);
        queue
            .fetch()
            .map_err(UblkError::system("its first requests"))?;
        Ok(queue)
    };
    let mut queue = match made() {
        Ok(queue) => queue,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    let _ = ready.send(Ok(()));
    drop(ready);
    if let Err(error) = queue.run(setup.options.idle_window) {
        tracing::error!(queue = number, %error, "ublk: the queue's ring failed");
    }
    // All requests of the device are over: the kernel waits for them before it ends the tags.
    if number == 0
        && let Err(error) = queue.flush()
    {
        tracing::error!(%error, "a flush failed: completed writes may not be durable");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volume::{FileOptions, FileVolume};

    /// As a queue's thread begins, up to the device that only a kernel with ublk has.
    #[test]
    fn a_queues_ring_is_as_the_options_say() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let volume = FileVolume::open(file.path(), FileOptions::default()).unwrap();
        let memory = Memory::anonymous(2 << 20).unwrap();
        let options = DiskOptions::default();
        let wanted = options.io(64);
        assert_eq!((wanted.capacity, wanted.sqpoll), (65, false));
        let io = Io::new(wanted);
        let _queue = volume.open(&io).unwrap();
        assert!(pin(&io, &memory).is_none());
        let options = DiskOptions {
            pin_memory: true,
            sqpoll: true,
            ..options
        };
        assert!(options.io(64).sqpoll);
        let io = Io::new(IoOptions {
            sqpoll: false,
            ..options.io(64)
        });
        let _queue = volume.open(&io).unwrap();
        let pinned = pin(&io, &memory);
        if pinned.is_none() {
            println!("skipped: the kernel pins nothing here (ulimit -l)");
            return;
        }
        assert_eq!(io.pinned(), 1);
    }
}
