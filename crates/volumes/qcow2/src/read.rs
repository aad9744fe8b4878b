//! Reads from a chain that take more than one operation on one file.

use crate::format::{L2Entry, Mapping};
use crate::image::Image;
use crate::inflate::inflate_elsewhere;
use crate::store::{Access, FileRole, IoOutcome, Store};
use crate::tables::TableLookup;
use crate::wait::pause;
use dma::SegmentList;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use volume::{IoError, IoErrorKind, Op};

/// Maximum number of operations that one request has outstanding at a time.
const MAX_STARTED: usize = 64;
/// Number of parts of a request after which a task yields to the worker's other tasks.
const PARTS: u32 = 64;

/// Location of the first byte of a range in one layer of the backing chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RangeLocation {
    /// The data is in the layer's file, at this byte offset.
    Data(u64),
    /// The range reads as zeroes.
    Zero,
    /// The layer does not contain the range; the layers below may.
    Below,
    /// The data is in a compressed cluster of the layer.
    Compressed { entry: L2Entry, host: u64, len: u64 },
}

/// Part of a request's range that is left to read.
struct Range {
    layer: usize,
    offset: u64,
    len: u64,
    /// Byte offset in the memory of the request.
    to: u64,
}

impl Image {
    /// Finds the location of the beginning of a range, and the number of bytes (at most `len`) that
    /// are contiguous there.
    pub(crate) async fn find(
        &self,
        store: &impl Store,
        offset: u64,
        len: u64,
    ) -> Result<(RangeLocation, u64), IoError> {
        let size = self.size();
        if offset >= size {
            return Ok((RangeLocation::Zero, len));
        }
        let len = len.min(size - offset);
        let Some(tables) = &self.tables else {
            return Ok((RangeLocation::Data(offset), len));
        };
        let bits = self.geometry.cluster_bits;
        let cluster = offset >> bits;
        let slice_bits = tables.slice_bits();
        let number = cluster >> slice_bits;
        let first = (cluster & ((1 << slice_bits) - 1)) as usize;
        let slice = match self.look(store, number).await? {
            TableLookup::Slice(slice) => slice,
            TableLookup::NoTable => {
                let end = (number + 1) << (slice_bits + bits);
                return Ok((RangeLocation::Below, len.min(end - offset)));
            }
        };
        let within = offset & (self.geometry.cluster_size() - 1);
        let begin = self.whereabouts(slice.get(first), within)?;
        let mut found = (self.geometry.cluster_size() - within).min(len);
        let mut next = first + 1;
        while found < len
            && next < slice.len()
            && !matches!(begin, RangeLocation::Compressed { .. })
        {
            // An invalid entry is reported when the read reaches it.
            let Ok(place) = self.whereabouts(slice.get(next), 0) else {
                break;
            };
            let goes_on = match (begin, place) {
                (RangeLocation::Data(start), RangeLocation::Data(more)) => start + found == more,
                (begin, place) => begin == place,
            };
            if !goes_on {
                break;
            }
            found = (found + self.geometry.cluster_size()).min(len);
            next += 1;
        }
        Ok((begin, found))
    }

    /// Returns the location of byte `within` of the guest cluster that an L2 entry maps.
    fn whereabouts(&self, entry: L2Entry, within: u64) -> Result<RangeLocation, IoError> {
        Ok(match entry.mapping(&self.geometry) {
            Mapping::Unallocated => RangeLocation::Below,
            Mapping::Zero { .. } => RangeLocation::Zero,
            Mapping::Data { host, .. } => RangeLocation::Data(host + within),
            Mapping::Compressed { host, len } => RangeLocation::Compressed { entry, host, len },
            Mapping::Invalid => return Err(IoErrorKind::MediaRead.into()),
        })
    }

    /// Returns the decompressed content of a cluster, from the cache if it is there.
    async fn decompress(
        &self,
        store: &impl Store,
        entry: L2Entry,
        host: u64,
        len: u64,
    ) -> Result<Arc<Vec<u8>>, IoError> {
        if let Some(bytes) = self.inflated.find(entry.0) {
            return Ok(bytes);
        }
        // At most two clusters.
        let from = store.read(self.layer, host, len as usize).await?;
        let size = self.geometry.cluster_size() as usize;
        let bytes = inflate_elsewhere(store, from.to_vec(), size).await;
        if bytes.is_err_and_kind(IoErrorKind::MediaRead) {
            self.complain("leads to a compressed cluster that cannot be decompressed");
        }
        let bytes = Arc::new(bytes?);
        self.inflated.keep(entry.0, bytes.clone());
        Ok(bytes)
    }
}

trait IsKind {
    fn is_err_and_kind(&self, kind: IoErrorKind) -> bool;
}

impl<T> IsKind for Result<T, IoError> {
    fn is_err_and_kind(&self, kind: IoErrorKind) -> bool {
        self.as_ref().is_err_and(|error| error.kind == kind)
    }
}

/// Outstanding file operations of one request, limited in number.
#[derive(Default)]
pub(crate) struct StartedOperations(VecDeque<Pin<Box<dyn Future<Output = IoOutcome>>>>);

impl StartedOperations {
    /// Adds an outstanding operation.
    pub(crate) fn push(&mut self, operation: impl Future<Output = IoOutcome> + 'static) {
        self.0.push_back(Box::pin(operation));
    }

    /// Waits until fewer than the maximum number of operations are outstanding.
    pub(crate) async fn below_most(&mut self) -> Result<(), IoError> {
        while self.0.len() >= MAX_STARTED
            && let Some(operation) = self.0.pop_front()
        {
            operation.await.0?;
        }
        Ok(())
    }

    /// Waits for all outstanding operations, and returns the first error.
    pub(crate) async fn all(mut self) -> Result<(), IoError> {
        let mut result = Ok(());
        while let Some(operation) = self.0.pop_front() {
            result = result.and(operation.await.0);
        }
        result
    }
}

/// Reads all of `data` from a layer and the layers below it.
pub(crate) async fn read<S: Store>(
    images: &[Image],
    store: &S,
    layer: usize,
    offset: u64,
    data: &SegmentList,
) -> Result<(), IoError> {
    let mut started = StartedOperations::default();
    let result = read_parts(images, store, layer, offset, data, &mut started).await;
    // All started operations have ended before this function returns.
    let rest = started.all().await;
    result.and(rest)
}

/// Returns whether the tables of a layer and the layers below it show that a whole range reads as
/// zeroes, without reading data.
pub(crate) async fn reads_as_zeroes<S: Store>(
    images: &[Image],
    store: &S,
    layer: usize,
    offset: u64,
    len: u64,
) -> Result<bool, IoError> {
    let mut left = vec![(layer, offset, len)];
    let mut parts = 0;
    while let Some((layer, offset, len)) = left.pop() {
        parts += 1;
        if parts % PARTS == 0 {
            pause().await;
        }
        let Some(image) = images.get(layer) else {
            continue;
        };
        let (place, found) = image.find(store, offset, len).await?;
        if found < len {
            left.push((layer, offset + found, len - found));
        }
        match place {
            RangeLocation::Zero => {}
            RangeLocation::Below => left.push((layer + 1, offset, found)),
            RangeLocation::Data(_) | RangeLocation::Compressed { .. } => return Ok(false),
        }
    }
    Ok(true)
}

async fn read_parts<S: Store>(
    images: &[Image],
    store: &S,
    layer: usize,
    offset: u64,
    data: &SegmentList,
    started: &mut StartedOperations,
) -> Result<(), IoError> {
    let mut left = vec![Range {
        layer,
        offset,
        len: data.len_bytes(),
        to: 0,
    }];
    let mut parts = 0;
    while let Some(mut range) = left.pop() {
        parts += 1;
        if parts % PARTS == 0 {
            pause().await;
        }
        let (place, len) = match images.get(range.layer) {
            Some(image) => image.find(store, range.offset, range.len).await?,
            None => (RangeLocation::Zero, range.len),
        };
        if len < range.len {
            left.push(Range {
                offset: range.offset + len,
                len: range.len - len,
                to: range.to + len,
                ..range
            });
            range.len = len;
        }
        let mut memory = SegmentList::new();
        let slice = |memory: &mut SegmentList| data.slice(range.to, len, memory);
        match place {
            RangeLocation::Data(at) => {
                slice(&mut memory);
                started.below_most().await?;
                started.push(store.start(Access {
                    layer: range.layer,
                    part: FileRole::Data,
                    op: Op::Read,
                    at,
                    len,
                    data: memory,
                }));
            }
            RangeLocation::Zero => {
                if slice(&mut memory) != len || memory.fill(0) != len {
                    return Err(IoErrorKind::Memory.into());
                }
            }
            RangeLocation::Below => left.push(Range {
                layer: range.layer + 1,
                ..range
            }),
            RangeLocation::Compressed {
                entry,
                host,
                len: packed,
            } => {
                let image = images.get(range.layer).ok_or(IoErrorKind::Invalid)?;
                let bytes = image.decompress(store, entry, host, packed).await?;
                let from = range.offset & (image.geometry.cluster_size() - 1);
                let bytes = usize::try_from(from)
                    .ok()
                    .and_then(|from| bytes.get(from..));
                let bytes = bytes.and_then(|bytes| bytes.get(..len as usize));
                let bytes = bytes.ok_or(IoErrorKind::Invalid)?;
                if data.copy_from(range.to, bytes) as u64 != len {
                    return Err(IoErrorKind::Memory.into());
                }
            }
        }
    }
    Ok(())
}
