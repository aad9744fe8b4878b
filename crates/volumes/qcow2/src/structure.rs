//! Growth of an image's metadata: new refcount blocks, a larger refcount table, a larger L1 table.
//!
//! A task that does so holds a lock of [`Writer::structure`]: number 0 for the refcount table and
//! its blocks, number 1 for the L1 table and its L2 tables.

use crate::format::{OFFSET_L1, OFFSET_REFCOUNTS, OFFSET_SIZE};
use crate::image::{Image, Writer};
use crate::refcounts::Refcounts;
use crate::store::Store;
use crate::tables::L1;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use volume::{IoError, IoErrorKind};

/// Maximum number of entries of a refcount table, equal to QEMU's (`QCOW_MAX_REFTABLE_SIZE`).
const MAX_REFTABLE_LEN: usize = (8 << 20) / 8;

/// Refcount table that receives the entries of new refcount blocks.
enum EntryTable {
    /// The refcount table that the image has.
    Current,
    /// A new refcount table of this many bytes, placed into the allocated clusters.
    New(usize),
}

impl Image {
    /// Creates the refcount block with this index, unless it exists.
    pub(crate) async fn add_block(
        &self,
        writer: &Writer,
        store: &impl Store,
        index: usize,
    ) -> Result<(), IoError> {
        let _turn = writer.structure.lock(store, 0..1).await?;
        if writer.refcounts().blocks().any(|(known, _)| known == index) {
            return Ok(());
        }
        self.place(writer, store, 0, EntryTable::Current)
            .await
            .map(drop)
    }

    /// Allocates adjacent clusters that were never used, with a refcount of one, and creates the
    /// refcount blocks for them. All of this is durable when it returns.
    async fn place(
        &self,
        writer: &Writer,
        store: &impl Store,
        count: u64,
        table: EntryTable,
    ) -> Result<Range<u64>, IoError> {
        let _shield = store.shield();
        let placed = self.try_place(writer, store, count, table).await;
        if placed.is_err() {
            // Clusters may have been counted although nothing leads to them.
            writer.unsound.store(true, Ordering::Release);
        }
        placed
    }

    async fn try_place(
        &self,
        writer: &Writer,
        store: &impl Store,
        count: u64,
        table: EntryTable,
    ) -> Result<Range<u64>, IoError> {
        let bits = self.geometry.cluster_bits;
        let room = match table {
            EntryTable::Current => writer.refcounts().room(),
            EntryTable::New(bytes) => bytes / 8,
        };
        let (start, indices) = {
            let mut refcounts = writer.refcounts();
            let reserved = refcounts.reserve(count).ok_or(IoErrorKind::NoSpace)?;
            if reserved.1.iter().any(|&index| index >= room) {
                return Err(IoErrorKind::NoSpace.into());
            }
            reserved
        };
        let clusters = start..start + count;
        let all = start..clusters.end + indices.len() as u64;
        let mut new = Refcounts::new(self.geometry, room, None);
        let mut places = HashMap::new();
        for (&index, cluster) in indices.iter().zip(clusters.end..) {
            places.insert(index, cluster << bits);
            new.enter(index, cluster << bits, vec![0; 1 << bits].into());
        }
        for cluster in all.clone() {
            if new.counts(cluster) {
                new.set(cluster, 1)
            } else {
                writer.refcounts().set(cluster, 1)
            }
        }
        let blocks: Vec<(usize, u64, Box<[u8]>)> = new
            .blocks()
            .map(|(index, block)| (index, block.at, block.bytes().into()))
            .collect();
        for (_, at, bytes) in &blocks {
            store.write(*at, bytes).await?;
        }
        writer.settle(store, &all).await?;
        if let EntryTable::New(bytes) = table {
            let mut entries = vec![0u8; bytes];
            let (slots, _) = entries.as_chunks_mut::<8>();
            let known: Vec<(usize, u64)> = {
                let refcounts = writer.refcounts();
                refcounts
                    .blocks()
                    .map(|(index, block)| (index, block.at))
                    .collect()
            };
            for (index, at) in known
                .into_iter()
                .chain(places.iter().map(|(&i, &at)| (i, at)))
            {
                if let Some(slot) = slots.get_mut(index) {
                    *slot = at.to_be_bytes();
                }
            }
            store.write(start << bits, &entries).await?;
        }
        writer.barrier(store).await?;
        match table {
            EntryTable::Current => {
                let table = writer.reftable.load(Ordering::Acquire);
                for (&index, at) in &places {
                    store
                        .write(table + index as u64 * 8, &at.to_be_bytes())
                        .await?;
                }
            }
            EntryTable::New(_) => {
                let mut field = [0; 12];
                let (place, number) = field.split_at_mut(8);
                place.copy_from_slice(&(start << bits).to_be_bytes());
                number.copy_from_slice(&u32::try_from(count).unwrap_or(0).to_be_bytes());
                store.write(OFFSET_REFCOUNTS, &field).await?;
                writer.reftable.store(start << bits, Ordering::Release);
            }
        }
        writer.barrier(store).await?;
        writer.enter_own(all);
        let mut refcounts = writer.refcounts();
        refcounts.set_room(room);
        for (index, at, bytes) in blocks {
            refcounts.enter(index, at, bytes);
        }
        Ok(clusters)
    }

    /// Enlarges the refcount table for a completely written disk of `size` bytes, with a margin.
    pub(crate) async fn make_room(
        &self,
        writer: &Writer,
        store: &impl Store,
        size: u64,
    ) -> Result<(), IoError> {
        let geometry = &self.geometry;
        let data = geometry.clusters(size);
        let tables = geometry.l1_entries(size);
        let l1 = geometry.clusters(tables * 8);
        let sum = data + tables + l1;
        let blocks = (sum >> geometry.refcount_bits()) + 1;
        // Margin for freed clusters that are not reusable yet, and for old tables.
        let clusters = sum + blocks + sum / 4 + 64;
        let needed = (clusters >> geometry.refcount_bits()) + 1;
        let needed = usize::try_from(needed).map_err(|_| IoErrorKind::NoSpace)?;
        let (room, next) = {
            let refcounts = writer.refcounts();
            (refcounts.room(), refcounts.next_block())
        };
        // The new table and its blocks need some, too; no table is longer than QEMU has it.
        let needed = (needed.max(next) + 2).min(MAX_REFTABLE_LEN);
        if needed <= room {
            return Ok(());
        }
        let _change = writer.begin(store).await?;
        let _turn = writer.structure.lock(store, 0..1).await?;
        let room = writer.refcounts().room();
        let mut own = geometry.clusters(needed as u64 * 8);
        let more = needed as u64 + (own >> geometry.refcount_bits()) + 1;
        own = geometry.clusters(more.min(MAX_REFTABLE_LEN as u64) * 8);
        let bytes = usize::try_from(own << geometry.cluster_bits);
        let bytes = bytes.map_err(|_| IoErrorKind::NoSpace)?;
        let old = writer.reftable.load(Ordering::Acquire) >> geometry.cluster_bits;
        let old = old..old + geometry.clusters(room as u64 * 8);
        self.place(writer, store, own, EntryTable::New(bytes))
            .await?;
        writer.leave_own(old.clone());
        self.release(writer, store, vec![old]).await
    }

    /// Grows the virtual disk to `size` bytes, with a larger L1 table if necessary.
    pub(crate) async fn grow(
        &self,
        writer: &Writer,
        store: &impl Store,
        size: u64,
    ) -> Result<(), IoError> {
        let _change = writer.begin(store).await?;
        self.make_room(writer, store, size).await?;
        self.grow_l1(writer, store, size).await?;
        store.write(OFFSET_SIZE, &size.to_be_bytes()).await?;
        writer.barrier(store).await?;
        self.size.store(size, Ordering::Release);
        Ok(())
    }

    async fn grow_l1(&self, writer: &Writer, store: &impl Store, size: u64) -> Result<(), IoError> {
        let geometry = &self.geometry;
        let tables = self.tables.as_ref().ok_or(IoErrorKind::Invalid)?;
        let _turn = writer.structure.lock(store, 1..2).await?;
        let old = tables.l1();
        let needed = geometry.l1_entries(size);
        if needed <= old.len() as u64 {
            return Ok(());
        }
        let clusters = geometry.clusters(needed * 8);
        let entries = (clusters << geometry.cluster_bits) / 8;
        let number = u32::try_from(entries).map_err(|_| IoErrorKind::NoSpace)?;
        let place = {
            let _turn = writer.structure.lock(store, 0..1).await?;
            self.place(writer, store, clusters, EntryTable::Current)
                .await?
        };
        let at = place.start << geometry.cluster_bits;
        let mut bytes: Vec<u8> = old.iter().flat_map(u64::to_be_bytes).collect();
        bytes.resize(usize::try_from(entries * 8).unwrap_or(bytes.len()), 0);
        store.write(at, &bytes).await?;
        writer.barrier(store).await?;
        let mut field = [0; 12];
        let (count, offset) = field.split_at_mut(4);
        count.copy_from_slice(&number.to_be_bytes());
        offset.copy_from_slice(&at.to_be_bytes());
        store.write(OFFSET_L1, &field).await?;
        writer.barrier(store).await?;
        tables.replace_l1(L1::new(at, &bytes));
        let first = old.at >> geometry.cluster_bits;
        let old = first..first + geometry.clusters(old.len() as u64 * 8).max(1);
        writer.leave_own(old.clone());
        self.release(writer, store, vec![old]).await
    }
}
