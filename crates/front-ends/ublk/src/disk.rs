//! Life cycle of a ublk disk: created or recovered, served, resized, stopped.

use crate::control::{Control, open_device};
use crate::queue::{EndedQueues, Queue, QueueParts};
use crate::stats::{DiskStats, QueueStats};
use crate::sys::QueueRing;
use crate::uapi::{self, DevInfo};
use crate::{UblkError, params};
use dma::Memory;
use std::any::Any;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};
use volume::{IoLimits, PinnedWindows, Volume};
use worker::Context;

/// Maximum length of a request in bytes; each tag has a buffer of that size.
pub const MAX_IO: u64 = 512 << 10;
/// Numbers of queues that a ublk disk may have.
const QUEUES: std::ops::RangeInclusive<u16> = 1..=64;
/// Maximum time to wait until the kernel has noticed the end of a server.
const DEATH_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time that the removal of a device waits until its users have closed it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Options of a ublk disk, the block device that this process serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskOptions {
    /// Number of the device, N of `/dev/ublkbN`; chosen by the kernel if `None`.
    pub id: Option<u32>,
    /// Number of queues of the block device, 1 to 64.
    pub queues: u16,
    /// Maximum number of outstanding requests of each queue, 1 to 4096.
    pub depth: u16,
    /// Logical block size in bytes; `None` for that of the volume, at least 512.
    pub block_size: Option<u32>,
    /// Keep the disk when this process is killed. The next process that is started with the same
    /// number continues it and repeats the unfinished requests. Without this option the disk
    /// disappears with the process.
    pub recover: bool,
}

impl Default for DiskOptions {
    fn default() -> Self {
        Self {
            id: None,
            queues: 1,
            depth: 128,
            block_size: None,
            recover: false,
        }
    }
}

impl DiskOptions {
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

/// A served disk. [`Disk::stop`] removes it; dropping it does the same without reporting errors.
pub struct Disk {
    id: u32,
    control: Control,
    volume: Arc<dyn Volume>,
    /// Size of the block device in bytes that the kernel was told.
    size: u64,
    stats: Arc<DiskStats>,
    served: Arc<EndedQueues>,
    queues: usize,
    /// Receiver that fails once all queues, each with a sender, have been dropped.
    gone: Receiver<Infallible>,
    /// Registrations of the queues' memory with NVMe devices of the volume, kept until the queues
    /// have been dropped.
    registrations: Vec<Box<dyn Any + Send>>,
    halted: bool,
    stopped: bool,
}

/// ublk disk that is not served yet. Dropping it removes the device.
pub struct NewDisk {
    /// Sender that must be dropped first, because the end of the disk waits for it.
    going: Sender<Infallible>,
    disk: Disk,
    device: Arc<OwnedFd>,
    info: DevInfo,
    recovered: bool,
}

impl NewDisk {
    /// Creates a disk for the volume, or recovers the disk with the configured number after its
    /// server was killed. [`NewDisk::start`] begins serving it.
    ///
    /// # Errors
    /// [`UblkError`] when the options are invalid, or the kernel refuses the device.
    pub fn new(volume: Arc<dyn Volume>, options: DiskOptions) -> Result<Self, UblkError> {
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
        let (going, gone) = mpsc::channel();
        let disk = Disk {
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
            served: Arc::default(),
            queues: usize::from(info.nr_hw_queues),
            gone,
            registrations: Vec::new(),
            halted: false,
            stopped: false,
        };
        match open_device(id) {
            Ok(device) => Ok(Self {
                going,
                disk,
                device: Arc::new(device),
                info,
                recovered,
            }),
            Err(error) => {
                // The disk's end waits for all senders.
                drop(going);
                Err(error)
            }
        }
    }

    /// Starts serving the disk. `register` registers a queue's memory with NVMe devices of the
    /// volume; its result is kept while the memory is used. `serve` passes each queue to a worker
    /// on another thread, which must call [`QueueSetup::open`].
    ///
    /// # Errors
    /// [`UblkError`] when a queue or the block device cannot be started.
    pub fn start(
        self,
        register: &mut dyn FnMut(&Memory) -> Box<dyn Any + Send>,
        serve: &mut dyn FnMut(QueueSetup),
    ) -> Result<Disk, UblkError> {
        let Self {
            going,
            mut disk,
            device,
            info,
            recovered,
        } = self;
        disk.serve(&info, &device, register, serve, going)?;
        drop(device);
        let id = disk.id;
        let served = disk.served.clone();
        let mut sensible = || served.gone.load(Ordering::Acquire) == 0;
        disk.control.start(id, recovered, &mut sensible)?;
        tracing::info!(
            device = format_args!("/dev/ublkb{id}"),
            bytes = disk.size,
            queues = info.nr_hw_queues,
            depth = info.queue_depth,
            recovered,
            "block device"
        );
        Ok(disk)
    }
}

/// Queue of a ublk disk that is sent to the worker which will serve it.
pub struct QueueSetup {
    number: u16,
    info: DevInfo,
    device: Arc<OwnedFd>,
    memory: Memory,
    volume: Arc<dyn Volume>,
    stats: Arc<DiskStats>,
    served: Arc<EndedQueues>,
    ready: Sender<Result<(), UblkError>>,
    gone: Sender<Infallible>,
}

/// Error of a queue that could not be created; the disk has already received the reason.
#[derive(Debug, thiserror::Error)]
#[error("a queue of a ublk disk could not be made")]
pub struct QueueSetupFailed;

impl QueueSetup {
    /// Returns the index of the queue in its disk, starting at 0.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Returns the counters of the disk that the queue belongs to.
    pub fn stats(&self) -> Arc<DiskStats> {
        self.stats.clone()
    }

    /// Creates the queue, on the thread that will serve it, and fetches requests from the kernel.
    ///
    /// # Errors
    /// [`QueueSetupFailed`] when the queue cannot be created; the disk gets the reason.
    pub fn open(self, context: &Context<'_>) -> Result<Queue, QueueSetupFailed> {
        let ready = self.ready.clone();
        let (made, told) = match self.make(context) {
            Ok(queue) => (Ok(queue), Ok(())),
            Err(error) => (Err(QueueSetupFailed), Err(error)),
        };
        // The disk waits for the result, unless another queue has failed.
        let _ = ready.send(told);
        made
    }

    fn make(self, context: &Context<'_>) -> Result<Queue, UblkError> {
        let volume = self.volume.open(context.io)?;
        let (info, bytes) = (self.info, u64::from(self.info.max_io_buf_bytes));
        let mut pinned = PinnedWindows::new(context.io.pinner());
        pinned.mapped(0, self.memory.len() as u64, &self.memory, 0);
        let ring = QueueRing::new(
            self.device,
            self.number,
            info.queue_depth,
            self.memory,
            bytes,
        );
        let parts = QueueParts {
            ring: ring.map_err(UblkError::system("a queue's ring"))?,
            volume,
            pinned,
            number: self.number,
            depth: info.queue_depth,
            owner: context.owner,
            io: context.io.clone(),
            stats: self.stats,
            served: self.served,
            gone: self.gone,
            descriptors: context.descriptors.clone(),
        };
        Queue::new(parts).map_err(UblkError::system("its first requests"))
    }
}

impl Disk {
    /// Passes the queues to their workers, and waits until all of them fetch requests.
    fn serve(
        &mut self,
        info: &DevInfo,
        device: &Arc<OwnedFd>,
        register: &mut dyn FnMut(&Memory) -> Box<dyn Any + Send>,
        serve: &mut dyn FnMut(QueueSetup),
        gone: Sender<Infallible>,
    ) -> Result<(), UblkError> {
        let (ready, readies) = mpsc::channel();
        for number in 0..info.nr_hw_queues {
            let bytes = usize::from(info.queue_depth) * info.max_io_buf_bytes as usize;
            let memory = Memory::anonymous(bytes)?;
            self.registrations.push(register(&memory));
            serve(QueueSetup {
                number,
                info: *info,
                device: device.clone(),
                memory,
                volume: self.volume.clone(),
                stats: self.stats.clone(),
                served: self.served.clone(),
                ready: ready.clone(),
                gone: gone.clone(),
            });
        }
        drop((ready, gone));
        let told: Vec<()> = readies.into_iter().collect::<Result<_, _>>()?;
        // A queue whose worker has ended sends no result.
        if told.len() == self.queues {
            Ok(())
        } else {
            Err(UblkError::QueueEnded { id: self.id })
        }
    }

    /// Returns the number N of the device `/dev/ublkbN`.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Returns the counters of the disk.
    pub fn stats(&self) -> Arc<DiskStats> {
        self.stats.clone()
    }

    /// Returns whether all queues are served. They end when the kernel removes the device, or on an
    /// error.
    pub fn is_alive(&self) -> bool {
        self.served.gone.load(Ordering::Acquire) == 0
    }

    /// Announces the volume's size to the kernel, if it has changed since the last call of
    /// [`Volume::refresh`], which the caller makes. Returns `true` when the kernel was notified.
    ///
    /// # Errors
    /// [`UblkError`] when the kernel refuses the size.
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

    /// Ends serving the disk: the block layer writes its pending data, and the queues' workers make
    /// it durable. [`Disk::stop`] removes the device afterwards.
    ///
    /// # Errors
    /// [`UblkError`] when the kernel cannot stop the device.
    pub fn halt(&mut self) -> Result<(), UblkError> {
        if std::mem::replace(&mut self.halted, true) {
            return Ok(());
        }
        // Without limits, the block layer's pending data is written quickly.
        if let Some(limits) = self.volume.limits() {
            limits.set(IoLimits::default());
        }
        let stopped = self.control.stop(self.id);
        // The kernel has ended all tags when every sender is dropped.
        let _ = self.gone.recv();
        self.registrations.clear();
        stopped
    }

    /// Removes the disk after [`Disk::halt`].
    ///
    /// # Errors
    /// [`UblkError`] when the device cannot be stopped or deleted.
    pub fn stop(mut self) -> Result<(), UblkError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), UblkError> {
        if std::mem::replace(&mut self.stopped, true) {
            return Ok(());
        }
        let halted = self.halt();
        let failed = self.served.clean.load(Ordering::Relaxed) != self.queues;
        halted?;
        // Other users may keep the device open for long. It is deleted after their last close.
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        if !self
            .control
            .delete_before(self.id, &mut || Instant::now() < deadline)?
        {
            tracing::warn!(
                "/dev/ublkb{}: still open; it disappears when it is closed",
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

/// Deletes the device with this number that an earlier server left, or returns it for recovery.
fn left_over(control: &mut Control, id: u32, recover: bool) -> Result<Option<DevInfo>, UblkError> {
    let deadline = Instant::now() + DEATH_TIMEOUT;
    while let Some(info) = control.info(id)? {
        match info.state {
            uapi::STATE_QUIESCED if recover => return Ok(Some(info)),
            uapi::STATE_LIVE => {
                let pid = info.ublksrv_pid;
                if Path::new(&format!("/proc/{pid}")).exists() || Instant::now() > deadline {
                    return Err(UblkError::InUse { id, pid });
                }
                // The process was killed a moment ago, and the kernel has not noticed yet.
                std::thread::sleep(RETRY_INTERVAL);
            }
            _ => {
                control.stop(id)?;
                control.delete(id)?;
            }
        }
    }
    Ok(None)
}

/// Removes a disk that a killed process left, whether or not it waits for recovery.
///
/// # Errors
/// [`UblkError`], for example when the disk is being served.
pub fn remove(id: u32) -> Result<(), UblkError> {
    let mut control = Control::open()?;
    left_over(&mut control, id, false).map(drop)
}
