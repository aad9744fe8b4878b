//! Writes to an image that take more than one operation on its file, because clusters are
//! allocated, zeroed or freed. [`Writer`] defines the order of the operations.

use crate::format::{L2Entry, Mapping};
use crate::image::{Allocated, Image, Writer};
use crate::read::{self, StartedOperations};
use crate::store::{self, Access, Store};
use crate::tables::{Slice, TableLookup};
use crate::wait::{both, pause};
use dma::{Buffer, SegmentList};
use std::ops::Range;
use volume::{IoError, IoErrorKind, Op};

const WRITE: Op = Op::Write { fua: false };

/// Smallest number of bytes that are left out where a cluster is read around a write. Below it, one
/// read of all costs less than two.
const MIN_LEFT_OUT: u64 = 16 << 10;

/// Image that is being written, with its backing chain and the files' queues.
pub(crate) struct WriteTarget<'a, S> {
    pub(crate) images: &'a [Image],
    pub(crate) image: &'a Image,
    pub(crate) writer: &'a Writer,
    pub(crate) store: &'a S,
}

/// Planned write from a request's memory to the image's file.
struct Move {
    at: u64,
    from: u64,
    len: u64,
}

/// Appends a move, merged with the previous one if they are adjacent in the file and in memory.
fn join(moves: &mut Vec<Move>, next: Move) {
    match moves.last_mut() {
        Some(last) if last.at + last.len == next.at && last.from + last.len == next.from => {
            last.len += next.len;
        }
        _ => moves.push(next),
    }
}

/// Part of a request that lies within one L2 slice.
#[derive(Clone, Copy)]
struct Span {
    /// Byte offset of the part on the virtual disk.
    offset: u64,
    len: u64,
    /// Byte offset of the part in the request's memory.
    from: u64,
}

impl<'a, S: Store> WriteTarget<'a, S> {
    /// Creates a target for the first image of a chain, if it may be written.
    pub(crate) fn new(images: &'a [Image], store: &'a S) -> Result<Self, IoError> {
        let image = images.first().ok_or(IoErrorKind::Gone)?;
        Ok(Self {
            images,
            image,
            writer: image.writer.as_ref().ok_or(IoErrorKind::ReadOnly)?,
            store,
        })
    }

    fn cluster_size(&self) -> u64 {
        self.image.geometry.cluster_size()
    }

    fn bits(&self) -> u32 {
        self.image.geometry.cluster_bits
    }

    /// Returns the number of bytes of the virtual disk that one L2 slice maps.
    fn slice_bytes(&self) -> u64 {
        let bits = self
            .image
            .tables
            .as_ref()
            .map_or(0, |tables| tables.slice_bits());
        1 << (bits + self.bits())
    }

    /// Returns the index, within its slice, of the cluster that contains this byte of the disk.
    fn index(&self, offset: u64) -> usize {
        ((offset & (self.slice_bytes() - 1)) >> self.bits()) as usize
    }

    /// Returns the guest clusters that a range of the virtual disk touches.
    fn clusters(&self, offset: u64, len: u64) -> Range<u64> {
        offset >> self.bits()..self.image.geometry.clusters(offset + len)
    }

    /// Returns whether a backing image may have data at this offset of the virtual disk.
    fn is_backed(&self, offset: u64) -> bool {
        let below = self.images.get(1);
        below.is_some_and(|below| offset < below.size())
    }

    /// Writes all of `data` to the virtual disk.
    pub(crate) async fn write(
        &self,
        offset: u64,
        data: &SegmentList,
        fua: bool,
    ) -> Result<(), IoError> {
        let (slice, len) = (self.slice_bytes(), data.len_bytes());
        let mut done = 0;
        while done < len {
            let offset = offset + done;
            let span = Span {
                offset,
                len: (len - done).min(slice - (offset & (slice - 1))),
                from: done,
            };
            self.write_span(span, data).await?;
            done += span.len;
            if done < len {
                pause().await;
            }
        }
        if fua {
            self.writer.flush(self.store).await
        } else {
            Ok(())
        }
    }

    async fn write_span(&self, span: Span, data: &SegmentList) -> Result<(), IoError> {
        let number = span.offset / self.slice_bytes();
        if let TableLookup::Slice(slice) = self.image.look(self.store, number).await?
            && let Some(moves) = self.in_place(&slice, span)
        {
            let mut started = StartedOperations::default();
            self.start(&mut started, moves, data);
            return started.all().await;
        }
        let clusters = self.clusters(span.offset, span.len);
        let _turn = self.writer.clusters.lock(self.store, clusters).await?;
        let _change = self.writer.begin(self.store).await?;
        let slice = self
            .image
            .slice_to_write(self.writer, self.store, number)
            .await?;
        let mut plan = Plan::default();
        let mut written = self.plan(&slice, span, &mut plan).await;
        let Plan {
            allocated,
            entries,
            parts,
            mut barrier,
            frees,
        } = plan;
        let deferred = self.writer.deferred.as_ref();
        let deferred = deferred.filter(|deferred| !frees && deferred.takes(entries.len()));
        if written.is_ok() {
            let moved = self.carry_out(&parts, data);
            let (moved, counted) = match deferred {
                // The refcounts are written with the entries.
                Some(_) => (moved.await, Ok(())),
                // The clusters are counted while their old data is read, and while they are
                // written.
                None => both(moved, settle(&allocated, self.store)).await,
            };
            barrier |= matches!(moved, Ok(true));
            written = moved.map(drop).and(counted);
        }
        written?;
        let first = self.index(span.offset);
        if let Some(deferred) = deferred {
            let (image, writer, place) = (self.image, self.writer, (&slice, first));
            let clusters = (writer, allocated);
            let set = image.defer_entries(deferred, clusters, self.store, place, &entries, barrier);
            return set.await;
        }
        if barrier {
            self.writer.flush_all(self.store).await?;
        }
        if entries
            .iter()
            .enumerate()
            .all(|(at, entry)| slice.get(first + at) == *entry)
        {
            return Ok(());
        }
        let (image, writer, store) = (self.image, self.writer, self.store);
        let set = image
            .set_entries(writer, store, &slice, first, &entries)
            .await;
        allocated.into_iter().for_each(|new| new.keep(&set));
        set
    }

    /// Returns the moves for a span if all its clusters may be written in place; `None` otherwise.
    fn in_place(&self, slice: &Slice, span: Span) -> Option<Vec<Move>> {
        let mut moves = Vec::new();
        for piece in self.pieces(span) {
            let host = slice.get(piece.index).plain(true)?;
            join(&mut moves, piece.to(host));
        }
        Some(moves)
    }

    /// Splits a part of a request at cluster boundaries.
    fn pieces(&self, span: Span) -> impl Iterator<Item = ClusterPiece> + use<S> {
        let (size, first) = (self.cluster_size(), self.index(span.offset));
        let start = span.offset & !(size - 1);
        let clusters = self.clusters(span.offset, span.len);
        (0..clusters.end - clusters.start).map(move |n| {
            let cluster = start + n * size;
            let begin = span.offset.max(cluster);
            let end = (span.offset + span.len).min(cluster + size);
            ClusterPiece {
                index: first + n as usize,
                cluster,
                within: begin - cluster,
                len: end - begin,
                from: span.from + (begin - span.offset),
            }
        })
    }

    /// Plans the writes for a part of a request, and allocates host clusters for them.
    async fn plan<'p>(&self, slice: &Slice, span: Span, plan: &mut Plan<'p>) -> Result<(), IoError>
    where
        'a: 'p,
    {
        let pieces: Vec<ClusterPiece> = self.pieces(span).collect();
        let mapping = |piece: &ClusterPiece| slice.get(piece.index).mapping(&self.image.geometry);
        let is_new = |piece: &ClusterPiece| {
            use Mapping::{Compressed, Unallocated, Zero};
            matches!(
                mapping(piece),
                Unallocated | Zero { host: None } | Compressed { .. }
            )
        };
        // Clusters that were allocated for those that come.
        let mut ready: Range<u64> = 0..0;
        let mut zeroed = false;
        for (at, &piece) in pieces.iter().enumerate() {
            let (host, zeroed) = match mapping(&piece) {
                Mapping::Data { host, copied: true } => {
                    plan.entries.push(L2Entry::data(host));
                    plan.parts.push(ClusterWrite {
                        piece,
                        host,
                        zeroed: false,
                        copy: None,
                    });
                    continue;
                }
                // The host cluster is reserved for this guest cluster, and its content is unknown.
                Mapping::Zero { host: Some(host) } => (host, false),
                Mapping::Invalid | Mapping::Data { .. } => {
                    return Err(IoErrorKind::MediaWrite.into());
                }
                _ => {
                    if ready.is_empty() {
                        let following = pieces.iter().skip(at);
                        let most = following.take_while(|piece| is_new(piece)).count();
                        let (image, writer) = (self.image, self.writer);
                        let new = image.allocate(writer, self.store, most as u64).await?;
                        (ready, zeroed) = (new.run.clusters.clone(), new.run.zeroed);
                        plan.allocated.push(new);
                    }
                    let cluster = ready.next().ok_or(IoErrorKind::NoSpace)?;
                    (cluster << self.bits(), zeroed)
                }
            };
            plan.entries.push(L2Entry::data(host));
            plan.frees |= matches!(mapping(&piece), Mapping::Compressed { .. });
            let reads_zeroes = match mapping(&piece) {
                Mapping::Zero { .. } => true,
                Mapping::Unallocated if self.is_backed(piece.cluster) => {
                    let (images, store, len) = (self.images, self.store, self.cluster_size());
                    let zeroes = read::reads_as_zeroes(images, store, 1, piece.cluster, len).await;
                    // The read of its content finds the error.
                    zeroes.unwrap_or(false)
                }
                Mapping::Unallocated => true,
                _ => false,
            };
            let is_whole = piece.within == 0 && piece.len == self.cluster_size();
            let is_plain = is_whole || (reads_zeroes && zeroed);
            plan.barrier |= is_whole && !(reads_zeroes && zeroed);
            plan.parts.push(ClusterWrite {
                piece,
                host,
                zeroed,
                copy: (!is_plain).then_some(Merge { reads_zeroes }),
            });
        }
        Ok(())
    }

    /// Writes the parts of a request to their clusters. Returns whether these must be durable
    /// before any entry refers to them.
    async fn carry_out(&self, parts: &[ClusterWrite], data: &SegmentList) -> Result<bool, IoError> {
        let mut started = StartedOperations::default();
        let result = self.start_parts(parts, data, &mut started).await;
        // All writes to the clusters have ended before the clusters are freed.
        let rest = started.all().await;
        result.and_then(|barrier| rest.map(|()| barrier))
    }

    async fn start_parts(
        &self,
        parts: &[ClusterWrite],
        data: &SegmentList,
        started: &mut StartedOperations,
    ) -> Result<bool, IoError> {
        let mut moves = Vec::new();
        let mut barrier = false;
        for part in parts {
            let Some(copy) = &part.copy else {
                join(&mut moves, part.piece.to(part.host));
                continue;
            };
            let (mut cluster, is_whole) = self.content(&part.piece, copy.reads_zeroes).await?;
            let bytes = cluster.buffer().ok_or(IoErrorKind::Invalid)?;
            if part.zeroed && is_whole && is_zero(bytes) {
                // The new cluster has all of it already.
                join(&mut moves, part.piece.to(part.host));
                continue;
            }
            let within = part.piece.within as usize;
            let bytes = bytes.get_mut(within..within + part.piece.len as usize);
            let bytes = bytes.ok_or(IoErrorKind::Invalid)?;
            if data.copy_to(part.piece.from, bytes) != bytes.len() {
                return Err(IoErrorKind::Memory.into());
            }
            barrier = true;
            started.below_most().await?;
            started.push(self.store.start(Access {
                layer: 0,
                part: store::FileRole::Data,
                op: WRITE,
                at: part.host,
                len: self.cluster_size(),
                data: cluster,
            }));
        }
        self.start(started, moves, data);
        Ok(barrier)
    }

    /// Reads the content of a cluster before the request, to be merged with a piece. Around a long
    /// piece, only what the request leaves is read. Returns whether all is read.
    async fn content(
        &self,
        piece: &ClusterPiece,
        reads_zeroes: bool,
    ) -> Result<(SegmentList, bool), IoError> {
        let size = self.cluster_size();
        let content = SegmentList::owned(Buffer::new(size as usize));
        if reads_zeroes {
            return Ok((content, true));
        }
        // Behind the disk's end there is nothing to be seen by anybody, ever.
        let there = size.min(self.image.size().saturating_sub(piece.cluster));
        let end = piece.within + piece.len;
        let parts = if piece.len < MIN_LEFT_OUT {
            [0..there, 0..0]
        } else {
            [0..piece.within, end..there]
        };
        for range in parts.iter().filter(|range| !range.is_empty()) {
            let mut part = SegmentList::new();
            content.slice(range.start, range.end - range.start, &mut part);
            read::read(
                self.images,
                self.store,
                0,
                piece.cluster + range.start,
                &part,
            )
            .await?;
        }
        Ok((content, piece.len < MIN_LEFT_OUT))
    }

    fn start(&self, started: &mut StartedOperations, moves: Vec<Move>, data: &SegmentList) {
        for Move { at, from, len } in moves {
            let mut memory = SegmentList::new();
            data.slice(from, len, &mut memory);
            started.push(self.store.start(Access {
                layer: 0,
                part: store::FileRole::Data,
                op: WRITE,
                at,
                len,
                data: memory,
            }));
        }
    }

    /// Zeroes or deallocates a range of the virtual disk, depending on `op`.
    pub(crate) async fn zero(&self, offset: u64, len: u64, op: Op) -> Result<(), IoError> {
        let slice = self.slice_bytes();
        let mut done = 0;
        while done < len {
            let offset = offset + done;
            let span = Span {
                offset,
                len: (len - done).min(slice - (offset & (slice - 1))),
                from: 0,
            };
            done += self.zero_span(span, len - done, op).await?;
            if done < len {
                pause().await;
            }
        }
        match op {
            Op::WriteZeroes { fua: true, .. } => self.writer.flush(self.store).await,
            _ => Ok(()),
        }
    }

    /// Zeroes a span. Where there is no L2 table, zeroes more of the `left` bytes at once. Returns
    /// the number of bytes.
    async fn zero_span(&self, span: Span, left: u64, op: Op) -> Result<u64, IoError> {
        let number = span.offset / self.slice_bytes();
        let looked = self.image.look(self.store, number).await?;
        if matches!(looked, TableLookup::NoTable) && !self.is_backed(span.offset) {
            // The whole range that the L2 table would map.
            let table = self.cluster_size() << self.image.geometry.table_bits();
            return Ok(left.min(table - (span.offset & (table - 1))));
        }
        let size = self.cluster_size();
        let mut whole: Option<Span> = None;
        for piece in self.pieces(span) {
            // The disk's last cluster ends with the disk.
            let end = self.image.size() - piece.cluster;
            if piece.within == 0 && piece.len == size.min(end) {
                let first = whole.get_or_insert(Span {
                    offset: piece.cluster,
                    len: 0,
                    from: 0,
                });
                first.len += piece.len;
            } else {
                self.zero_piece(number, &piece, op).await?;
            }
        }
        if let Some(whole) = whole {
            self.zero_clusters(number, whole, op).await?;
        }
        Ok(span.len)
    }

    /// Zeroes a part of one guest cluster.
    async fn zero_piece(&self, number: u64, piece: &ClusterPiece, op: Op) -> Result<(), IoError> {
        let mapping = match self.image.look(self.store, number).await? {
            TableLookup::Slice(slice) => slice.get(piece.index).mapping(&self.image.geometry),
            TableLookup::NoTable => Mapping::Unallocated,
        };
        let discards = op == Op::Deallocate;
        match mapping {
            Mapping::Data { host, copied: true } => {
                let (at, len) = (host + piece.within, piece.len);
                let op = match op {
                    Op::WriteZeroes { deallocate, .. } => Op::WriteZeroes {
                        deallocate,
                        fua: false,
                    },
                    op => op,
                };
                match self.store.change(op, at, len).await {
                    Err(error) if discards && error.kind == IoErrorKind::Unsupported => Ok(()),
                    result => result,
                }
            }
            Mapping::Invalid | Mapping::Data { .. } => Err(IoErrorKind::MediaWrite.into()),
            _ if discards => Ok(()),
            Mapping::Zero { .. } => Ok(()),
            Mapping::Unallocated if !self.is_backed(piece.cluster) => Ok(()),
            _ => {
                let zeroes = SegmentList::owned(Buffer::new(piece.len as usize));
                let span = Span {
                    offset: piece.cluster + piece.within,
                    len: piece.len,
                    from: 0,
                };
                self.write_span(span, &zeroes).await
            }
        }
    }

    /// Zeroes whole guest clusters that one L2 slice maps.
    async fn zero_clusters(&self, number: u64, span: Span, op: Op) -> Result<(), IoError> {
        let clusters = self.clusters(span.offset, span.len);
        let _turn = self.writer.clusters.lock(self.store, clusters).await?;
        let frees = !matches!(
            op,
            Op::WriteZeroes {
                deallocate: false,
                ..
            }
        );
        let slice = match self.image.look(self.store, number).await? {
            TableLookup::Slice(slice) => slice,
            TableLookup::NoTable => {
                let _change = self.writer.begin(self.store).await?;
                self.image
                    .slice_to_write(self.writer, self.store, number)
                    .await?
            }
        };
        let (mut entries, mut moves) = (Vec::new(), Vec::new());
        for piece in self.pieces(span) {
            let entry = slice.get(piece.index);
            // An unallocated entry would expose the data of the backing file again.
            let nothing = if self.is_backed(piece.cluster) {
                L2Entry::zero()
            } else {
                L2Entry(0)
            };
            entries.push(match entry.mapping(&self.image.geometry) {
                Mapping::Invalid => return Err(IoErrorKind::MediaWrite.into()),
                Mapping::Unallocated => nothing,
                Mapping::Zero { host: None } => entry,
                Mapping::Compressed { .. } => nothing,
                Mapping::Data { copied: false, .. } => return Err(IoErrorKind::MediaWrite.into()),
                Mapping::Data { .. } | Mapping::Zero { .. } if frees => nothing,
                Mapping::Data { host, .. } => {
                    join(&mut moves, piece.to(host));
                    entry
                }
                Mapping::Zero { .. } => entry,
            });
        }
        let op = Op::WriteZeroes {
            deallocate: false,
            fua: false,
        };
        for Move { at, len, .. } in moves {
            self.store.change(op, at, len).await?;
        }
        let first = self.index(span.offset);
        if entries
            .iter()
            .enumerate()
            .all(|(at, entry)| slice.get(first + at) == *entry)
        {
            return Ok(());
        }
        let _change = self.writer.begin(self.store).await?;
        let (image, writer, store) = (self.image, self.writer, self.store);
        image
            .set_entries(writer, store, &slice, first, &entries)
            .await
    }
}

/// Returns whether all bytes are zero.
fn is_zero(bytes: &[u8]) -> bool {
    let mut pages = bytes.chunks(4096);
    // Without a look at each byte's result, so that many are looked at in one step.
    pages.all(|page| page.iter().fold(0, |any, byte| any | byte) == 0)
}

/// Writes the refcounts of all newly allocated host clusters to the disk.
async fn settle(allocated: &[Allocated<'_>], store: &impl Store) -> Result<(), IoError> {
    for new in allocated {
        new.settle(store).await?;
    }
    Ok(())
}

/// Part of a request that lies within one guest cluster.
#[derive(Clone, Copy)]
struct ClusterPiece {
    /// Index of the guest cluster's entry in the L2 slice.
    index: usize,
    /// Byte offset of the guest cluster on the virtual disk.
    cluster: u64,
    /// Byte offset of the part in the guest cluster.
    within: u64,
    len: u64,
    /// Byte offset of the part in the request's memory.
    from: u64,
}

impl ClusterPiece {
    /// Returns the write of this part into the host cluster at file offset `host`.
    fn to(&self, host: u64) -> Move {
        Move {
            at: host + self.within,
            from: self.from,
            len: self.len,
        }
    }
}

/// Part of a request with the host cluster that it is written to.
struct ClusterWrite {
    piece: ClusterPiece,
    /// Byte offset of the host cluster in the file.
    host: u64,
    /// Whether the host cluster durably reads as zeroes, so that its rest need not be written.
    zeroed: bool,
    /// Old content to be merged around the piece, when the cluster is written as a whole.
    copy: Option<Merge>,
}

/// Source of the old content of a cluster, for the bytes around a partial write.
struct Merge {
    /// Whether the old content is known to be zeroes, so that no read is necessary.
    reads_zeroes: bool,
}

/// Planned steps of a write to one L2 slice.
#[derive(Default)]
struct Plan<'a> {
    allocated: Vec<Allocated<'a>>,
    /// New values of the L2 entries that the write changes.
    entries: Vec<L2Entry>,
    parts: Vec<ClusterWrite>,
    /// Whether the clusters must be durable before any entry refers to them.
    ///
    /// After a loss of power the guest finds old or new data. Zeroes, where written data has not
    /// reached the disk, count as old data only where there was nothing.
    barrier: bool,
    /// Whether the write frees clusters: of compressed data.
    frees: bool,
}
