//! Internal invariants, which only an error in this crate can violate.
//!
//! Examples: an outstanding command has a slot, a slot has a namespace, and a submission queue
//! exists until the completions of its commands are posted. No guest, VMM or volume can violate
//! such an invariant. After a violation the controller's work for its guest is unreliable. With
//! debug assertions (tests, fuzz targets) a violation panics. Otherwise the controller fails
//! (CSTS.CFS) until the guest resets it, and the process continues to serve its other controllers.
//!
//! Errors caused from outside are not handled here: they have a status in the standard.

use super::{Event, Events};

#[cfg(test)]
thread_local! {
    /// Whether violated invariants are reported instead of panicking. Tests set this value.
    static REPORT: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Returns whether a violation is reported even with debug assertions.
fn is_reported() -> bool {
    #[cfg(test)]
    return REPORT.get();
    #[cfg(not(test))]
    return false;
}

/// Reports the violation of an invariant, which `what` names. The caller only has to return.
#[cold]
#[inline(never)]
pub(super) fn broken(events: &mut Events, what: &'static str) {
    debug_assert!(is_reported(), "{what}");
    events.push_back(Event::Broken(what));
}

#[cfg(test)]
mod tests {
    use super::REPORT;
    use crate::config::ControllerConfig;
    use crate::control::Controller;
    use dma::{Memory, Prot};
    use nvme::Status;
    use nvme::regs::{self, Aqa, Cc, Csts};
    use std::time::Instant;
    use volume::{Io, IoOptions};

    fn csts(controller: &mut Controller) -> Csts {
        let mut bytes = [0; 4];
        controller.bar0_read(regs::CSTS, &mut bytes);
        Csts::from_bits(u32::from_le_bytes(bytes))
    }

    fn enabled() -> Controller {
        let io = Io::new(IoOptions::default());
        let config = ControllerConfig::default();
        let mut controller = Controller::new(0, config, Vec::new(), &io).unwrap();
        let memory = Memory::anonymous(1 << 20).unwrap();
        let backing = Some((memory, 0));
        controller.dma_map(0, 1 << 20, backing, Prot::RW).unwrap();
        // Memory Space Enable and Bus Master Enable.
        controller.config_write(4, &6u16.to_le_bytes());
        let aqa = Aqa::new().with_asqs_z(15).with_acqs_z(15);
        controller.bar0_write(regs::AQA, &aqa.into_bits().to_le_bytes());
        controller.bar0_write(regs::ASQ, &0x1000u64.to_le_bytes());
        controller.bar0_write(regs::ACQ, &0x2000u64.to_le_bytes());
        let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
        controller.bar0_write(regs::CC, &cc.into_bits().to_le_bytes());
        assert!(csts(&mut controller).rdy() && !csts(&mut controller).cfs());
        controller
    }

    /// Violates an invariant: ends a command of a queue that does not exist.
    fn break_a_rule(controller: &mut Controller) {
        controller.engine.finish(5, 1, Status::SUCCESS, 0);
        controller.engine.end_round();
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "a command ends whose queue is gone")]
    fn broken_invariant_panics_with_debug_assertions() {
        break_a_rule(&mut enabled());
    }

    #[test]
    fn broken_invariant_fails_controller_until_reset() {
        REPORT.set(true);
        let mut controller = enabled();
        break_a_rule(&mut controller);
        break_a_rule(&mut controller);
        assert!(controller.poll(Instant::now()));
        assert!(csts(&mut controller).cfs());
        let cc = Cc::new();
        controller.bar0_write(regs::CC, &cc.into_bits().to_le_bytes());
        controller.poll(Instant::now());
        assert!(!csts(&mut controller).cfs() && !csts(&mut controller).rdy());
    }

    #[test]
    fn command_without_namespace_fails_with_its_controller() {
        REPORT.set(true);
        let mut controller = enabled();
        let index = controller.engine.slots.alloc().unwrap();
        controller.engine.slots.get(index).unwrap().ns = 99;
        assert_eq!(controller.engine.execution().namespace_of(index), None);
        let slot = controller.engine.slots.get(index).unwrap();
        assert_eq!(slot.status, Status::INTERNAL_ERROR);
        assert!(controller.poll(Instant::now()));
        assert!(csts(&mut controller).cfs());
    }

    #[test]
    fn invariant_broken_during_reset_lets_reset_finish() {
        REPORT.set(true);
        let mut controller = enabled();
        controller.bar0_write(regs::CC, &Cc::new().into_bits().to_le_bytes());
        break_a_rule(&mut controller);
        controller.poll(Instant::now());
        assert!(!csts(&mut controller).cfs());
        let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
        controller.bar0_write(regs::CC, &cc.into_bits().to_le_bytes());
        assert!(csts(&mut controller).rdy());
    }
}
