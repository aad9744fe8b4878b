//! Geometry of a namespace's placement: number of handles and size of reclaim units.

/// Maximum number of placement handles of a namespace ("NVM Command Set 1.1", 4.1.6).
pub const MAX_HANDLES: u16 = 128;
/// Maximum size of a reclaim unit in blocks.
pub const MAX_UNIT: u64 = 1 << 40;

/// Number of handles, and size of the reclaim units. It does not change while the namespace exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Number of placement handles, 1 to [`MAX_HANDLES`], which is also the number of reclaim unit
    /// handles. Handle 0 is the default.
    pub handles: u16,
    /// Size of a reclaim unit in blocks, 1 to [`MAX_UNIT`].
    pub unit: u64,
    /// Logical block size in bytes, in which reclaim units count.
    pub block: u32,
}

/// Reason why a placement geometry is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// The number of placement handles is 0 or too large.
    #[error("{0} placement handles: 1 to {MAX_HANDLES} are allowed")]
    Handles(u16),
    /// The size of a reclaim unit is 0 or too large.
    #[error("reclaim units of {0} blocks: 1 to 2^40 are allowed")]
    Unit(u64),
}

impl Geometry {
    /// Checks the number of handles and the size of the units.
    ///
    /// # Errors
    /// [`GeometryError`] names the invalid value.
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

    /// Returns the handle that a Placement Identifier selects. With a single reclaim group, all of
    /// its bits are the handle (RGIF 0h).
    pub fn handle_of(&self, identifier: u16) -> Option<u16> {
        (identifier < self.handles).then_some(identifier)
    }
}
