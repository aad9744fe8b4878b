//! Flexible Data Placement state of a namespace, and the table that stores it.
//!
//! The table is in memory, mapped from a file if the state has to outlast the process. A store to
//! the mapping needs no system call, and survives a crash of the process. All workers of a
//! controller write the table. It is never flushed: after a loss of power, the counts are those of
//! the kernel's last write-back.

use dma::{MapError, MemoryError, Rows, SharedPages};
use nvme::log::FdpEventType;
use placement::{Event, Geometry, GeometryError, Identity, Placement, Row, WordStore, table};
use std::sync::Arc;
use volume::Volume;

const _: () = assert!(table::ROW == dma::ROW);

/// Flexible Data Placement state of a namespace: placement handles, reclaim units and events.
#[derive(Debug)]
pub struct PlacementState {
    placement: Placement<PlacementTable>,
}

/// Table of a namespace's data placement state, in memory or in a mapped file.
#[derive(Debug)]
pub struct PlacementTable {
    rows: Rows,
    /// File with the lock that protects the table, open as long as the table is in use.
    _file: Option<Arc<dyn Volume>>,
}

impl PlacementTable {
    /// Opens a table ([`table::encode`]) in these pages. `file` is the file that they are mapped
    /// from, if it holds a lock. Returns `None` when there are fewer pages than the handles need.
    pub fn new(pages: &SharedPages, handles: u16, file: Option<Arc<dyn Volume>>) -> Option<Self> {
        let rows = Rows::new(pages, 0, table::rows(handles))?;
        Some(Self { rows, _file: file })
    }
}

impl WordStore for PlacementTable {
    fn row(&self, number: usize) -> Option<&Row> {
        self.rows.get(number)
    }
}

/// Reason why the data placement state cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum PlacementError {
    /// The number or size of the placement handles is invalid.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The memory of the placement table cannot be mapped.
    #[error("the table of placement handles: {0}")]
    Memory(MapError),
    /// The memory of the placement table cannot be written.
    #[error("the table of placement handles: {0}")]
    Write(MemoryError),
}

impl From<MapError> for PlacementError {
    fn from(error: MapError) -> Self {
        Self::Memory(error)
    }
}

impl PlacementState {
    /// Opens the data placement state that `table` contains.
    ///
    /// # Errors
    /// [`PlacementError::Geometry`] when the geometry is invalid.
    pub fn new(geometry: Geometry, table: PlacementTable) -> Result<Self, PlacementError> {
        let placement = Placement::new(geometry, table)?;
        Ok(Self { placement })
    }

    /// Creates data placement state in anonymous memory, which does not outlast the process.
    ///
    /// # Errors
    /// [`PlacementError`] when the geometry is invalid, or the memory cannot be mapped or written.
    pub fn in_memory(geometry: Geometry) -> Result<Self, PlacementError> {
        geometry.check()?;
        let pages = SharedPages::named("vnvme-fdp", table::len(geometry.handles).max(4096))?;
        let namespace = [0; 16];
        let bytes = table::encode(&geometry, Identity { namespace });
        let written = pages.memory().write(0, &bytes);
        written.map_err(PlacementError::Write)?;
        let table = PlacementTable::new(&pages, geometry.handles, None);
        let table = table.ok_or(GeometryError::Handles(geometry.handles))?;
        Self::new(geometry, table)
    }

    pub(crate) fn get(&self) -> &Placement<PlacementTable> {
        &self.placement
    }

    /// Records a data placement event, if the host has enabled recording of this event type for the
    /// placement handle.
    #[cold]
    pub(crate) fn happened(&self, ty: FdpEventType, nsid: u32, handle: u16, identifier: u16) {
        if self.placement.recorded(handle).contains(ty) {
            self.placement.record(&Event {
                ty,
                identifier,
                handle,
                nsid,
                at: crate::survival::wall_ms(),
            });
        }
    }
}
