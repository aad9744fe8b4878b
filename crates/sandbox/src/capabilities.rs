//! Capabilities of the calling thread.

use crate::Needs;
use rustix::io::{self, Errno};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities,
};

/// Those that are needed, whether they are held or not.
pub(crate) fn of(needs: &Needs) -> CapabilitySet {
    let mut kept = CapabilitySet::empty();
    kept.set(CapabilitySet::IPC_LOCK, needs.lock_memory);
    kept.set(CapabilitySet::SYS_ADMIN, needs.ublk);
    kept
}

/// Drops all but `wanted`, from every set; answers those that are left. Only what is held can be
/// kept.
pub(crate) fn drop_all_but(wanted: CapabilitySet) -> io::Result<CapabilitySet> {
    let held = capabilities(None)?;
    let kept = held.permitted & wanted;
    // It takes CAP_SETPCAP, and so comes first. Without that nothing is lost: a thread without new
    // privileges gets none from the bounding set.
    if held.effective.contains(CapabilitySet::SETPCAP) {
        for number in 0..u64::BITS {
            let one = CapabilitySet::from_bits_retain(1 << number);
            if kept.contains(one) {
                continue;
            }
            match remove_capability_from_bounding_set(one) {
                Ok(()) => {}
                // Beyond the last one that the kernel knows.
                Err(Errno::INVAL) => break,
                Err(error) => return Err(error),
            }
        }
    }
    match clear_ambient_capability_set() {
        // Before Linux 4.3 there is none.
        Ok(()) | Err(Errno::INVAL) => {}
        Err(error) => return Err(error),
    }
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets)?;
    Ok(kept)
}
