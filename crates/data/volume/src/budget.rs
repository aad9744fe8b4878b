//! The amount of work that a front-end may do before its worker checks the time again.

/// Amount of work that one call of a front-end's `poll` may do, similar to the budget of packets
/// that Linux's NAPI gives a network driver.
///
/// A unit is a command, 16 KiB of data, or 16 pieces of memory: at most about a microsecond of
/// processor time while all data is cached. The count need not be exact. A budget only bounds the
/// work between two reads of the processor's counter, by which the worker measures the time that a
/// front-end used.
#[derive(Debug)]
pub struct Budget {
    granted: u32,
    left: u32,
}

impl Budget {
    /// Number of transferred bytes that cost one unit of a round's budget.
    pub const BYTES_PER_UNIT: u64 = 16 << 10;
    /// Number of memory segments that cost one unit of a round's budget.
    pub const PIECES_PER_UNIT: u64 = 16;

    /// Creates a budget of `units` units for one round of work.
    #[inline(always)]
    pub const fn new(units: u32) -> Self {
        Self {
            granted: units,
            left: units,
        }
    }

    /// Creates a budget that no call uses up, for callers that serve only one client.
    pub const fn unlimited() -> Self {
        Self::new(u32::MAX)
    }

    /// Subtracts units from the budget, down to 0.
    #[inline(always)]
    pub fn spend(&mut self, units: u32) {
        self.left = self.left.saturating_sub(units);
    }

    /// Returns whether no more work may be begun in this call. The remaining work waits for the
    /// next call.
    #[inline(always)]
    pub fn is_spent(&self) -> bool {
        self.left == 0
    }

    /// Returns the number of units that the round may still spend.
    #[inline(always)]
    pub fn left(&self) -> u32 {
        self.left
    }

    /// Returns the number of units that the round has spent.
    pub fn spent(&self) -> u32 {
        self.granted - self.left
    }

    /// Returns the units for a command's data of `bytes` bytes in `pieces` pieces, without the unit
    /// for the command itself.
    #[inline(always)]
    pub fn units_of(bytes: u64, pieces: usize) -> u32 {
        let units =
            (bytes / Self::BYTES_PER_UNIT).saturating_add(pieces as u64 / Self::PIECES_PER_UNIT);
        // Saturates at 32 bits, which is more than any budget.
        units.min(u32::MAX.into()) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_is_spent_without_overdraft() {
        let mut budget = Budget::new(10);
        assert!(!budget.is_spent() && budget.left() == 10 && budget.spent() == 0);
        budget.spend(9);
        assert!(!budget.is_spent() && budget.spent() == 9);
        budget.spend(100);
        assert!(budget.is_spent() && budget.spent() == 10);
        assert!(Budget::new(0).is_spent());
    }

    #[test]
    fn budget_counts_bytes_and_pieces() {
        assert_eq!(Budget::units_of(4096, 1), 0);
        assert_eq!(Budget::units_of(1 << 20, 256), 64 + 16);
        assert_eq!(Budget::units_of(512, 8192), 512);
        assert_eq!(Budget::units_of(u64::MAX, usize::MAX), u32::MAX);
    }
}
