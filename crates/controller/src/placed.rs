//! The placement of a namespace, and the table that stores it.
//!
//! The table is memory, of a file if the state is to outlast the process: a word is in the file
//! when the store is done, without a system call. All workers of a controller change it. The
//! table is never flushed: after a loss of power, the counts are as old as the kernel's last
//! write-back.

use dma::{MapError, MemoryError, Rows, SharedPages};
use nvme::log::FdpEventType;
use placement::{Event, Geometry, GeometryError, Identity, Placement, Row, Words, table};
use std::sync::Arc;
use volume::Volume;

const _: () = assert!(table::ROW == dma::ROW);

/// The placement of a namespace.
#[derive(Debug)]
pub struct PlacementState {
    placement: Placement<PlacementTable>,
}

/// Storage of a placement's state.
#[derive(Debug)]
pub struct PlacementTable {
    rows: Rows,
    /// The file that holds the table's lock.
    _file: Option<Arc<dyn Volume>>,
}

impl PlacementTable {
    /// Opens a table ([`table::encode`]) in these pages; `file` is their file, if it has a lock.
    /// Returns `None` when the pages are fewer than the handles need.
    pub fn new(pages: &SharedPages, handles: u16, file: Option<Arc<dyn Volume>>) -> Option<Self> {
        let rows = Rows::new(pages, 0, table::rows(handles))?;
        Some(Self { rows, _file: file })
    }
}

impl Words for PlacementTable {
    fn row(&self, number: usize) -> Option<&Row> {
        self.rows.get(number)
    }
}

/// Reason why a placement cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum PlacementError {
    /// The geometry is invalid.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// There is no memory for the table.
    #[error("the table of placement handles: {0}")]
    Memory(MapError),
    /// The table's memory cannot be written.
    #[error("the table of placement handles: {0}")]
    Write(MemoryError),
}

impl From<MapError> for PlacementError {
    fn from(error: MapError) -> Self {
        Self::Memory(error)
    }
}

impl PlacementState {
    /// Opens the placement in this table.
    ///
    /// # Errors
    /// [`PlacementError::Geometry`].
    pub fn new(geometry: Geometry, table: PlacementTable) -> Result<Self, PlacementError> {
        let placement = Placement::new(geometry, table)?;
        Ok(Self { placement })
    }

    /// Creates a placement that ends with the process.
    ///
    /// # Errors
    /// [`PlacementError`].
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

    /// Reports an event, which the handle may have to record.
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
