//! An image as a [`Volume`].

use crate::blocking::{Blocking, block_on};
use crate::chain::{self, Qcow2Options};
use crate::deferred::Deferred;
use crate::error::ImageError;
use crate::image::{Image, Writer};
use crate::queue::ImageQueue;
use crate::read::read;
use dma::{Buffer, SegmentList};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use volume::{Extent, Info, Io, IoError, IoErrorKind, Kind, OpenQueue, Volume, VolumeError};

/// Number of size checks, one second apart, for which an image is at rest until its dirty bit is
/// cleared.
const IDLE_CHECKS: u32 = 10;
/// Number of size checks for which a deferred table entry waits at most until it is written to the
/// image.
const DEFERRED_CHECKS: u32 = 5;
/// Time limit, at the end of a volume, for clearing the header's dirty bit.
const END_LIMIT: Duration = Duration::from_secs(4);

/// A qcow2 image with its backing chain, as a volume.
#[derive(Debug)]
pub struct Qcow2Volume {
    images: Arc<Vec<Image>>,
    files: Blocking,
    info: Info,
    /// Size of the disk in bytes that was last reported.
    told: AtomicU64,
    /// The tables' changes when its size was last looked at, and for how many looks there were
    /// none.
    changes: AtomicU64,
    rest: AtomicU32,
    /// How often deferred entries had been written when that was last looked at, and for how many
    /// looks some have waited since.
    turns: AtomicU64,
    waited: AtomicU32,
}

impl Qcow2Volume {
    /// Opens an image, and all that is behind it.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn open(path: &Path, options: &Qcow2Options) -> Result<Self, ImageError> {
        let chain = chain::open(path, options)?;
        let info = info(&chain.images, options.read_only);
        Ok(Self {
            told: info.size.into(),
            changes: AtomicU64::new(0),
            rest: AtomicU32::new(0),
            turns: AtomicU64::new(0),
            waited: AtomicU32::new(0),
            info,
            images: Arc::new(chain.images),
            files: chain.files,
        })
    }

    fn image(&self) -> Option<(&Image, Option<&Writer>)> {
        let image = self.images.first()?;
        Some((image, image.writer.as_ref()))
    }

    fn size(&self) -> u64 {
        self.image().map_or(0, |(image, _)| image.size())
    }

    fn failed(&self, what: &'static str, error: IoError) -> VolumeError {
        VolumeError::System {
            path: self
                .image()
                .map(|(image, _)| image.path.clone())
                .unwrap_or_default(),
            what,
            error: match error.errno {
                0 => std::io::Error::other(error.kind.as_str()),
                errno => std::io::Error::from_raw_os_error(errno),
            },
        }
    }

    /// Returns whether deferred table entries have waited for long. To be called once for each size
    /// check.
    fn have_waited(&self, writer: &Writer) -> bool {
        let deferred = writer.deferred.as_ref().filter(|all| !all.is_empty());
        let turns = deferred.map(Deferred::turns);
        let waits = turns.is_some_and(|now| self.turns.swap(now, Ordering::Relaxed) == now);
        let waited = if waits {
            self.waited.load(Ordering::Relaxed) + 1
        } else {
            0
        };
        self.waited.store(waited, Ordering::Relaxed);
        waited >= DEFERRED_CHECKS
    }

    /// Returns the reason why the disk cannot be resized to `bytes` bytes; `None` if it can.
    fn refuse_size(&self, bytes: u64) -> Option<&'static str> {
        if !bytes.is_multiple_of(self.info.block_size.into()) || bytes >= 1 << 56 {
            return Some("it is not a whole number of blocks, or is too large");
        }
        if bytes < self.size() {
            return Some(
                "an image that is served can only grow; shrink it with qemu-img resize --shrink",
            );
        }
        if self
            .images
            .get(1)
            .is_some_and(|below| below.size() > self.size())
        {
            return Some(
                "its backing file is larger than the disk and would show in the new part; use \
                 qemu-img resize",
            );
        }
        None
    }
}

fn info(images: &[Image], read_only: bool) -> Info {
    let image = images.first();
    let file = image.map(|image| image.data.info());
    let cluster = image.map_or(1 << 16, |image| image.geometry.cluster_size());
    let is_alone = images.len() == 1;
    let zeroes = file
        .as_ref()
        .is_some_and(|file| file.zeroes_after_deallocate);
    let block = images
        .iter()
        .map(|image| image.data.unit())
        .max()
        .unwrap_or(0)
        .max(512);
    Info {
        size: image.map_or(0, Image::size),
        // At most a page.
        block_size: u32::try_from(block).unwrap_or(4096),
        optimal_io: file.as_ref().map_or(4096, |file| file.optimal_io.max(4096)),
        read_only,
        volatile_cache: true,
        deallocate: !read_only,
        deallocate_granularity: if read_only { 0 } else { cluster as u32 },
        zeroes_after_deallocate: !read_only && is_alone && zeroes,
        write_zeroes: !read_only,
        kind: Kind::File,
        description: describe(images, read_only),
    }
}

fn describe(images: &[Image], read_only: bool) -> String {
    let Some((image, below)) = images.split_first() else {
        return String::new();
    };
    let size = image.geometry.cluster_size();
    let clusters = match size >> 10 {
        0 => format!("{size} bytes"),
        kib => format!("{kib} KiB"),
    };
    let how = if image.data.is_direct() {
        "direct I/O"
    } else {
        "buffered I/O"
    };
    let only = if read_only { ", read-only" } else { "" };
    let behind: Vec<String> = below
        .iter()
        .map(|image| image.path.display().to_string())
        .collect();
    let behind = if behind.is_empty() {
        String::new()
    } else {
        format!(", on {}", behind.join(", on "))
    };
    format!(
        "qcow2 image {}, clusters of {clusters}, {how}{only}{behind}",
        image.path.display()
    )
}

impl Volume for Qcow2Volume {
    fn info(&self) -> Info {
        Info {
            size: self.size(),
            ..self.info.clone()
        }
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        let queue = ImageQueue::new(self.images.clone(), self.info(), io)?;
        Ok(OpenQueue::with_fast_path(queue))
    }

    fn id(&self) -> Vec<u8> {
        let id = self.image().map(|(image, _)| image.data.id());
        [b"qcow2:", id.unwrap_or_default().as_slice()].concat()
    }

    fn own_id(&self) -> Option<Vec<u8>> {
        let (image, _) = self.image()?;
        Some([b"qcow2:", image.data.own_id()?.as_slice()].concat())
    }

    /// Returns the names of the image's file and of all backing files.
    fn media(&self) -> Vec<String> {
        let images = self.images.iter();
        images.flat_map(|image| image.data.media()).collect()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }

    fn extent(&self) -> Option<Extent> {
        let (image, _) = self.image()?;
        image.extent()
    }

    fn resize(&self, bytes: u64) -> Result<(), VolumeError> {
        let (image, Some(writer)) = self.image().ok_or(VolumeError::FixedSize)? else {
            return Err(VolumeError::ReadOnlyMedium {
                path: self
                    .image()
                    .map(|(image, _)| image.path.clone())
                    .unwrap_or_default(),
            });
        };
        if let Some(why) = self.refuse_size(bytes) {
            return Err(VolumeError::Size { size: bytes, why });
        }
        let grown = block_on(image.grow(writer, &self.files, bytes));
        grown.map_err(|error| self.failed("cannot be resized", error))
    }

    fn read_at(&self, offset: u64, buffer: &mut Buffer) -> Option<Result<(), IoError>> {
        let data = SegmentList::owned(Buffer::new(buffer.len()));
        let result = block_on(read(&self.images, &self.files, 0, offset, &data));
        Some(result.and_then(|()| {
            if data.copy_to(0, buffer) == buffer.len() {
                Ok(())
            } else {
                Err(IoErrorKind::Memory.into())
            }
        }))
    }

    /// Refreshes the size without waiting, has table entries written that have been deferred for
    /// some seconds, and clears the dirty bit of an image that is at rest.
    fn refresh(&self) -> Result<bool, VolumeError> {
        let size = self.size();
        if let Some((_, Some(writer))) = self.image() {
            let changes = writer.changes();
            let quiet = self.changes.swap(changes, Ordering::Relaxed) == changes;
            let rest = if quiet && writer.is_at_rest() {
                self.rest.fetch_add(1, Ordering::Relaxed) + 1
            } else {
                self.rest.store(0, Ordering::Relaxed);
                0
            };
            let deferred = writer.deferred.as_ref().filter(|all| !all.is_empty());
            if let Some(deferred) = deferred.filter(|_| self.have_waited(writer)) {
                // A queue does so without blocking the guest's flush, and within the image's time
                // limit.
                if writer.epochs.has_queues() {
                    deferred.request();
                } else {
                    let written = block_on(writer.write_back(&self.files));
                    written.map_err(|error| self.failed("its tables cannot be written", error))?;
                }
            }
            if rest >= IDLE_CHECKS && deferred.is_none() {
                self.rest.store(0, Ordering::Relaxed);
                let ended = block_on(writer.end(&self.files));
                ended.map_err(|error| self.failed("its header cannot be written", error))?;
            }
        }
        Ok(self.told.swap(size, Ordering::Relaxed) != size)
    }
}

impl Drop for Qcow2Volume {
    /// Writes deferred entries and clears the header's dirty bit, if that takes less than the time
    /// limit.
    fn drop(&mut self) {
        let (_, writer) = self.image().unzip();
        let is_left = |writer: &Writer| writer.is_at_rest() || writer.has_deferred(0..u64::MAX);
        if !writer.flatten().is_some_and(is_left) {
            return;
        }
        let (images, files) = (self.images.clone(), self.files.clone());
        let (told, tell) = mpsc::channel();
        let closing = move || {
            if let Some(writer) = images.first().and_then(|image| image.writer.as_ref())
                && let Err(error) = block_on(async {
                    writer.write_back(&files).await?;
                    writer.end(&files).await
                })
            {
                tracing::warn!("an image was not closed cleanly: {error}");
            }
            // The files are closed before another process learns of it.
            drop((images, files));
            let _ = told.send(());
        };
        let builder = std::thread::Builder::new().name("qcow2".into());
        if builder.spawn(closing).is_ok() {
            let _ = tell.recv_timeout(END_LIMIT);
        }
    }
}

#[cfg(test)]
impl Qcow2Volume {
    /// Returns whether operations on a file of the chain end on threads of this process.
    pub(crate) fn has_threads(&self) -> bool {
        self.images.iter().any(|image| image.data.has_threads())
    }

    /// Returns whether any freed cluster waits for its reuse.
    pub(crate) fn has_limbo(&self) -> bool {
        self.image()
            .is_some_and(|(_, writer)| writer.is_some_and(Writer::has_limbo))
    }
}
