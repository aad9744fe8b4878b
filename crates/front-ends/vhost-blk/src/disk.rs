//! Volume and guest-visible properties, shared by all queues of an export.

use crate::error::Error;
use crate::request::{RequestLimits, VolumeOperation};
use crate::stats::Stats;
use crate::virtio::{ID_BYTES, SECTOR, Shape, feature};
use crate::wire::protocol;
use dma::View;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};
use volume::{Completion, Info, Io, IoError, Op, OpenQueue, Ownership, Request, Volume, Wake};
use zerocopy::IntoBytes;

/// Maximum number of request queues, because a queue's index is one byte.
pub(crate) const MAX_QUEUES: u16 = 256;
/// Lower 48 bits of the flush tag, which no request uses: [`run::tag`](crate::run::tag) has 32
/// bits.
const FLUSH_TAG: u64 = (1 << 48) - 1;

/// Returns whether the tag belongs to the flush that [`Disk::flush`] starts.
pub(crate) fn is_flush(tag: u64) -> bool {
    tag & FLUSH_TAG == FLUSH_TAG
}

/// Maximum number of entries of a virtqueue.
pub(crate) const MAX_QUEUE_SIZE: u16 = 1024;

/// Properties of a virtio block device that the guest sees.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Serial number for the request GET_ID, up to 20 bytes (`/sys/block/vda/serial` in a Linux
    /// guest).
    pub serial: String,
    /// Maximum number of request queues that a front-end may use, 1 to 256.
    pub queues: u16,
    /// Expected entries of a queue, a power of two from 4 to 1024. The front-end chooses the size;
    /// this value determines the size of requests (`seg_max` is two less, for the header and the
    /// status). Larger rings work, too.
    pub queue_size: u16,
    /// Logical block size in bytes, a power of two from 512 to 65536. By default the volume's, at
    /// least 512.
    pub block_size: Option<u32>,
    /// Whether the write cache is on at first. While it is off, every write is durable on
    /// completion.
    pub write_cache: bool,
    /// Maximum time for which a started disk waits until another process has released the volume.
    pub lock_timeout: Duration,
}

impl Default for DiskOptions {
    fn default() -> DiskOptions {
        DiskOptions {
            serial: String::new(),
            queues: 128,
            queue_size: 128,
            block_size: None,
            write_cache: true,
            lock_timeout: Duration::from_secs(30),
        }
    }
}

/// Volume that is opened on this thread, with the properties that the guest sees.
pub(crate) struct Disk {
    pub(crate) volume: Arc<dyn Volume>,
    queue: OpenQueue,
    /// Whether the queue completes requests at once ([`volume::FastPath::is_immediate`]), and
    /// whether it prefetches data. Both change only with [`Disk::update_volume`].
    immediate: bool,
    prefetches: bool,
    pub(crate) io: Rc<Io>,
    /// Number in the upper 16 bits of the tags of the disk's requests.
    owner: u16,
    max_in_flight: usize,
    pub(crate) shape: Shape,
    pub(crate) id: [u8; ID_BYTES],
    /// Number of the disk's requests that are outstanding at the volume.
    in_flight: usize,
    /// State of the write cache in the present connection; each begins with the option's state.
    pub(crate) write_cache: bool,
    write_cache_at_first: bool,
    pub(crate) limits: RequestLimits,
    /// Lock of the volume, which decides whether queues may run.
    pub(crate) ownership: Ownership,
}

impl Disk {
    pub(crate) fn open(
        volume: Arc<dyn Volume>,
        io: Rc<Io>,
        owner: u16,
        max_in_flight: usize,
        (options, stats, waker): (&DiskOptions, &Arc<Stats>, &Waker),
    ) -> Result<Disk, Error> {
        let wrong = |text: String| Err(Error::Option(text));
        let info = volume.info();
        let block_size = options.block_size.unwrap_or(info.block_size.max(512));
        if !block_size.is_power_of_two() || !(512..=65536).contains(&block_size) {
            return wrong(format!(
                "a block size of {block_size} bytes is not possible: it must be a power of two from 512 to 65536"
            ));
        }
        if block_size < info.block_size {
            return wrong(format!(
                "blocks of {block_size} bytes are not possible: the volume's have {}",
                info.block_size
            ));
        }
        if !info.size.is_multiple_of(u64::from(block_size)) {
            return wrong(format!(
                "the volume's size of {} bytes is not a multiple of {block_size} bytes",
                info.size
            ));
        }
        if !(1..=MAX_QUEUES).contains(&options.queues) {
            return wrong(format!(
                "{} queues are not possible: 1 to {MAX_QUEUES} are",
                options.queues
            ));
        }
        if !options.queue_size.is_power_of_two()
            || !(4..=MAX_QUEUE_SIZE).contains(&options.queue_size)
        {
            return wrong(format!(
                "queues of {} entries are not possible: it must be a power of two from 4 to {MAX_QUEUE_SIZE}",
                options.queue_size
            ));
        }
        if options.serial.len() > ID_BYTES {
            return wrong(format!(
                "the serial \"{}\" is longer than {ID_BYTES} bytes",
                options.serial
            ));
        }
        if options.serial.starts_with(' ') {
            return wrong(format!(
                "the serial \"{}\" begins with a space, which guests show differently; remove it",
                options.serial
            ));
        }
        let mut id = [0; ID_BYTES];
        for (to, from) in id.iter_mut().zip(options.serial.bytes()) {
            *to = from;
        }
        let shape = Shape {
            queues: options.queues,
            seg_max: u32::from(options.queue_size) - 2,
            block_size,
        };
        let queue = volume.open(&io)?;
        let incoming = stats.incoming.clone();
        let timeout = options.lock_timeout;
        let ownership = Ownership::new(volume.clone(), timeout, waker.clone(), incoming);
        let mut disk = Disk {
            ownership,
            volume,
            immediate: queue.is_immediate(),
            prefetches: queue.prefetches(),
            queue,
            io,
            owner,
            max_in_flight: max_in_flight.max(1),
            shape,
            id,
            in_flight: 0,
            write_cache: options.write_cache,
            write_cache_at_first: options.write_cache,
            limits: RequestLimits {
                block_size,
                max_transfer: shape.max_transfer(),
                fua: true,
                discard: false,
                write_zeroes: false,
            },
        };
        disk.negotiated(0);
        Ok(disk)
    }

    /// Returns the disk to the state at the beginning of a connection.
    pub(crate) fn reset(&mut self) {
        self.write_cache = self.write_cache_at_first;
        self.negotiated(0);
    }

    /// Applies the virtio features that the driver has accepted.
    pub(crate) fn negotiated(&mut self, features: u64) {
        self.limits.discard = features & feature::DISCARD != 0;
        self.limits.write_zeroes = features & feature::WRITE_ZEROES != 0;
        // "Without VIRTIO_BLK_F_FLUSH there is no cache that could be
        // flushed" (virtio 1.2, 5.2.6.2).
        self.limits.fua = !self.write_cache || features & feature::FLUSH == 0;
    }

    pub(crate) fn set_write_cache(&mut self, on: bool, features: u64) {
        self.write_cache = on;
        self.negotiated(features);
    }

    pub(crate) fn info(&self) -> Info {
        self.volume.info()
    }

    /// Returns the size of the disk in sectors of 512 bytes.
    pub(crate) fn capacity(&self) -> u64 {
        self.info().size / SECTOR
    }

    /// Returns whether the guest may migrate with the disk: its volume never changes, or has a lock
    /// that keeps two processes from writing it.
    fn migrates(&self) -> bool {
        self.ownership.has_lock() || self.info().read_only
    }

    /// Returns the offered virtio features.
    pub(crate) fn features(&self) -> u64 {
        let log = if self.migrates() { feature::LOG_ALL } else { 0 };
        self.shape.features(&self.info()) | log
    }

    /// Returns the offered vhost-user protocol features. A front-end refuses to migrate without
    /// that of the log.
    pub(crate) fn protocol(&self) -> u64 {
        let log = if self.migrates() {
            protocol::LOG_SHMFD
        } else {
            0
        };
        protocol::ALL | log
    }

    /// Starts the flush before the volume's release, if it is to be released and there is room.
    pub(crate) fn release(&mut self) {
        if self.has_room()
            && self.ownership.release()
            && let Some(completion) = self.flush()
        {
            self.released(completion);
        }
    }

    /// Continues the release with the completion of its flush.
    pub(crate) fn released(&mut self, completion: Completion) {
        let result = completion.result.map_err(|error| error.to_string());
        self.ownership.flushed(result);
    }

    /// Returns the bytes of the virtio configuration space.
    pub(crate) fn config(&self) -> Vec<u8> {
        let config = self.shape.config(&self.info(), self.write_cache);
        config.as_bytes().to_vec()
    }

    /// Returns whether the volume accepts one more request.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.in_flight < self.max_in_flight && self.io.in_flight() < self.io.capacity()
    }

    /// Returns whether [`Disk::try_now`] may execute requests.
    #[inline(always)]
    pub(crate) fn is_immediate(&self) -> bool {
        self.immediate
    }

    /// Keeps requests from the fast path.
    #[cfg(test)]
    pub(crate) fn use_general_path(&mut self) {
        self.immediate = false;
    }

    /// Executes a read or write of all of `data` at once, if the volume can.
    #[inline(always)]
    pub(crate) fn try_now(
        &mut self,
        op: Op,
        offset: u64,
        data: View<'_>,
    ) -> Option<Result<(), IoError>> {
        self.queue.try_now(op, offset, data)
    }

    /// Returns whether [`Disk::prefetch`] has an effect.
    #[inline(always)]
    pub(crate) fn prefetches(&self) -> bool {
        self.prefetches
    }

    /// Gives the volume a hint that this read or write follows soon.
    #[inline(always)]
    pub(crate) fn prefetch(&mut self, work: &VolumeOperation) {
        self.queue.prefetch(work.op, work.offset, work.len);
    }

    /// Returns whether the volume's error policy wants to repeat an operation that failed in
    /// [`Disk::try_now`].
    pub(crate) fn keeps_failed(&self, work: &VolumeOperation, error: IoError) -> bool {
        self.queue.keeps_failed(work.op, error)
    }

    /// Starts a request at the volume. Returns the completion, if the volume has completed it at
    /// once.
    #[inline]
    pub(crate) fn submit(&mut self, mut request: Request) -> Option<Completion> {
        request.tag |= u64::from(self.owner) << 48;
        let done = self.queue.submit(request);
        if done.is_none() {
            self.in_flight += 1;
        }
        done
    }

    /// Reports a failed request to the volume, which may repeat it by its policy; then another
    /// completion follows.
    pub(crate) fn failed(&mut self, mut request: Request, error: IoError) -> Option<Completion> {
        request.tag |= u64::from(self.owner) << 48;
        let failed = self.queue.failed(request, error);
        self.in_flight += usize::from(failed.is_none());
        failed
    }

    /// Returns the number of the disk's requests that are outstanding at the volume.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Returns whether the worker must poll for completions, because nothing wakes it.
    pub(crate) fn must_poll(&self) -> bool {
        self.queue.state().wake == Wake::Poll
    }

    /// Returns the time at which the volume must be polled although nothing wakes this thread.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.queue.state().wake.deadline(Instant::now)
    }

    /// Counts a request that the volume has completed.
    #[inline]
    pub(crate) fn completed(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Takes over changed settings of the volume.
    pub(crate) fn update_volume(&mut self) {
        self.queue.update();
        self.immediate = self.queue.is_immediate();
        self.prefetches = self.queue.prefetches();
    }

    /// Collects completions that do not come through the ring.
    #[inline]
    pub(crate) fn poll(&mut self, done: &mut Vec<Completion>) {
        self.queue.poll(&mut |completion| done.push(completion));
    }

    /// Starts a flush of the volume with a tag that no request uses.
    pub(crate) fn flush(&mut self) -> Option<Completion> {
        self.submit(Request {
            tag: FLUSH_TAG,
            op: Op::Flush,
            offset: 0,
            len: 0,
            data: dma::SegmentList::new(),
        })
    }
}
