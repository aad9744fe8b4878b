//! Capabilities of the calling thread.

use crate::Needs;
use rustix::io::{self, Errno};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities,
};

/// Returns the Linux capabilities that the process needs, whether it has them or not.
pub(crate) fn of(needs: &Needs) -> CapabilitySet {
    let mut kept = CapabilitySet::empty();
    kept.set(CapabilitySet::IPC_LOCK, needs.lock_memory);
    kept.set(CapabilitySet::SYS_ADMIN, needs.ublk);
    kept
}

/// Drops all capabilities but `wanted`, from every set; returns the remaining ones. Only held
/// capabilities can be kept.
pub(crate) fn drop_all_but(wanted: CapabilitySet) -> io::Result<CapabilitySet> {
    let held = capabilities(None)?;
    let kept = held.permitted & wanted;
    // Needs CAP_SETPCAP, and so is first. Without that capability the step is unnecessary: a thread
    // without new privileges gets none from the bounding set.
    if held.effective.contains(CapabilitySet::SETPCAP) {
        for number in 0..u64::BITS {
            let one = CapabilitySet::from_bits_retain(1 << number);
            if kept.contains(one) {
                continue;
            }
            match remove_capability_from_bounding_set(one) {
                Ok(()) => {}
                // The number is beyond the kernel's last capability.
                Err(Errno::INVAL) => break,
                Err(error) => return Err(error),
            }
        }
    }
    match clear_ambient_capability_set() {
        // Linux before 4.3 has no ambient set.
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
