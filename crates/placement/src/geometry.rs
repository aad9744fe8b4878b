//! Geometry of a namespace's placement: handles, and the size of reclaim units.

/// Placement handles of a namespace at most ("NVM Command Set 1.1", 4.1.6: 128).
pub const MAX_HANDLES: u16 = 128;
/// Blocks of a reclaim unit at most.
pub const MAX_UNIT: u64 = 1 << 40;

/// Number of handles, and size of the reclaim units. It does not change while the namespace exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Placement handles, and as many reclaim unit handles: handle 0 is the default one. 1 to
    /// [`MAX_HANDLES`].
    pub handles: u16,
    /// Blocks of a reclaim unit, 1 to [`MAX_UNIT`].
    pub unit: u64,
    /// Bytes of a block.
    pub block: u32,
}

/// Error in a geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// No handle, or too many.
    #[error("{0} placement handles: 1 to {MAX_HANDLES} are allowed")]
    Handles(u16),
    /// No block, or too many.
    #[error("reclaim units of {0} blocks: 1 to 2^40 are allowed")]
    Unit(u64),
}

impl Geometry {
    /// Checks the number of handles and the size of the units.
    ///
    /// # Errors
    /// [`GeometryError`].
    pub fn check(&self) -> Result<(), GeometryError> {
        if !(1..=MAX_HANDLES).contains(&self.handles) {
            return Err(GeometryError::Handles(self.handles));
        }
        if !(1..=MAX_UNIT).contains(&self.unit) {
            return Err(GeometryError::Unit(self.unit));
        }
        Ok(())
    }

    /// Returns the size of a reclaim unit in bytes.
    pub fn unit_bytes(&self) -> u64 {
        self.unit.saturating_mul(self.block.into())
    }

    /// The handle that a Placement Identifier names: with one reclaim group all of its bits are
    /// that (RGIF 0h).
    pub fn handle_of(&self, identifier: u16) -> Option<u16> {
        (identifier < self.handles).then_some(identifier)
    }
}
