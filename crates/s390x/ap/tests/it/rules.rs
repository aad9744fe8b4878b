//! The rules of the document one by one, on the smallest history that each needs. Those that hold
//! always are in `histories.rs` too.

use ap::card::Latency;
use ap::intercept::{self, Installed, InterceptOutcome, Registers};
use ap::outside::{GuestPage, PAGE_SIZE, Queues, RequestPart};
use ap::{Apqn, Facilities, Hardware, InterruptControl, Mask, Response, StillHeld, Subclass};

use crate::common::{ADAPTERS, DOMAINS, Device, PAGES, World, all_queues, device, millis};

const QUEUE: Apqn = Apqn::new(ADAPTERS[0], DOMAINS[0]);
const INSTANT: Latency = Latency {
    reset: 0,
    interrupts: 0,
    request: 0,
};

fn enable(page: u64, subclass: u8) -> InterruptControl {
    InterruptControl::Enable {
        subclass: Subclass::new(subclass),
        notification: page * PAGE_SIZE + 0x123,
    }
}

fn held(page: u64, subclass: u8) -> Option<(GuestPage, Subclass)> {
    Some((GuestPage(page), Subclass::new(subclass)))
}

fn request(device: &mut Device, apqn: Apqn) -> Response {
    let part = RequestPart {
        id: 1,
        data: b"x",
        last: true,
        special: false,
    };
    device.nqap(apqn, part).response
}

fn assert_nothing_held(world: &World) {
    assert!(world.pins.borrow().is_empty());
    assert!(world.subclasses.borrow().is_empty());
    assert_eq!(*world.faults.borrow(), [] as [String; 0]);
}

#[test]
fn aqic_enable_pins_registers_and_notifies() {
    let (mut device, world) = device(INSTANT);
    assert_eq!(device.aqic(QUEUE, enable(2, 6)).response, Response::NORMAL);
    assert!(device.tapq(QUEUE).0.interrupts);
    assert_eq!(device.registration(QUEUE), held(2, 6));
    assert_eq!(request(&mut device, QUEUE), Response::NORMAL);
    let written = world.written.borrow();
    let &[(apqn, target)] = written.as_slice() else {
        panic!("{written:?}");
    };
    assert_eq!((apqn, target.guest), (QUEUE, Subclass::new(6)));
    assert_eq!(target.notification.0 % PAGE_SIZE, 0x123);
}

#[test]
fn aqic_enabled_twice_keeps_first_settings() {
    let (mut device, world) = device(INSTANT);
    device.aqic(QUEUE, enable(2, 6));
    let again = device.aqic(QUEUE, enable(3, 5));
    assert_eq!(again.response, Response::OTHERWISE_CHANGED);
    assert_eq!(device.registration(QUEUE), held(2, 6));
    assert_eq!(world.pins.borrow().len(), 1);
}

#[test]
fn aqic_after_unseen_reset_releases_old_page_once() {
    let (mut device, world) = device(INSTANT);
    device.aqic(QUEUE, enable(2, 6));
    device.outside().queues.rapq(QUEUE);
    assert_eq!(device.registration(QUEUE), held(2, 6), "nobody told us");
    assert_eq!(device.aqic(QUEUE, enable(3, 5)).response, Response::NORMAL);
    assert_eq!(device.registration(QUEUE), held(3, 5));
    assert_eq!(world.pins.borrow().len(), 1);
    device.aqic(QUEUE, InterruptControl::Disable);
    assert_nothing_held(&world);
}

#[test]
fn aqic_disable_after_unseen_reset_releases_page_once() {
    let (mut device, world) = device(INSTANT);
    device.aqic(QUEUE, enable(2, 6));
    device.outside().queues.zapq(QUEUE);
    let status = device.aqic(QUEUE, InterruptControl::Disable);
    assert_eq!(status.response, Response::OTHERWISE_CHANGED);
    assert_nothing_held(&world);
}

#[test]
fn guest_reset_releases_page() {
    for instruction in [Device::rapq, Device::zapq] {
        let (mut device, world) = device(INSTANT);
        device.aqic(QUEUE, enable(2, 6));
        assert_eq!(instruction(&mut device, QUEUE).response, Response::NORMAL);
        assert_nothing_held(&world);
        assert!(!device.tapq(QUEUE).0.interrupts);
    }
}

#[test]
fn aqic_with_address_outside_guest_is_invalid() {
    let (mut device, world) = device(INSTANT);
    for page in [PAGES, u64::MAX / PAGE_SIZE] {
        let status = device.aqic(QUEUE, enable(page, 6));
        assert_eq!(status.response, Response::INVALID_ADDRESS);
    }
    assert_nothing_held(&world);
}

#[test]
fn aqic_without_subclass_releases_page() {
    let (mut device, world) = device(INSTANT);
    world.no_subclass.set(true);
    let status = device.aqic(QUEUE, enable(2, 6));
    assert_eq!(status.response, Response::INVALID_GISA);
    assert_nothing_held(&world);
}

#[test]
fn aqic_disable_waits_for_interrupt_bit() {
    let (mut device, world) = device(Latency {
        interrupts: millis(30),
        ..INSTANT
    });
    device.aqic(QUEUE, enable(2, 6));
    world.now.set(millis(100));
    assert!(device.tapq(QUEUE).0.interrupts);
    let status = device.aqic(QUEUE, InterruptControl::Disable);
    assert_eq!(status.response, Response::NORMAL);
    assert!(world.now.get() >= millis(130), "it waited");
    assert!(!device.tapq(QUEUE).0.interrupts);
    assert_nothing_held(&world);
}

#[test]
fn slow_queue_keeps_page_pinned() {
    let (mut device, world) = device(Latency {
        interrupts: millis(500),
        request: millis(50),
        ..INSTANT
    });
    device.aqic(QUEUE, enable(2, 6));
    world.now.set(millis(1000));
    request(&mut device, QUEUE);
    device.aqic(QUEUE, InterruptControl::Disable);
    assert_eq!(device.registration(QUEUE), held(2, 6));
    assert_eq!(device.poll(), Err(StillHeld(1)));
    assert_eq!(world.written.borrow().len(), 1, "its last notification");
    world.now.set(millis(2000));
    assert_eq!(device.poll(), Ok(()));
    assert_nothing_held(&world);
}

#[test]
fn unmap_of_page_disables_interrupts() {
    let (mut device, world) = device(INSTANT);
    device.aqic(QUEUE, enable(2, 6));
    let other = Apqn::new(ADAPTERS[1], DOMAINS[1]);
    device.aqic(other, enable(4, 6));
    assert_eq!(device.unmap(GuestPage(0), 2), Ok(()), "other pages");
    assert_eq!(device.registration(QUEUE), held(2, 6));
    assert_eq!(device.unmap(GuestPage(1), 3), Ok(()));
    assert_eq!(device.registration(QUEUE), None);
    assert!(!device.tapq(QUEUE).0.interrupts);
    assert_eq!(device.registration(other), held(4, 6));
    assert_eq!(world.pins.borrow().len(), 1);
}

#[test]
fn unmap_waits_or_reports_busy() {
    let (mut device, world) = device(Latency {
        interrupts: millis(500),
        ..INSTANT
    });
    device.aqic(QUEUE, enable(2, 6));
    // Still on their way in: the interrupt bit is zero, and that means nothing.
    assert!(!device.tapq(QUEUE).0.interrupts);
    assert_eq!(device.unmap(GuestPage(2), 1), Err(StillHeld(1)));
    world.now.set(millis(1000));
    assert_eq!(device.unmap(GuestPage(2), 1), Err(StillHeld(1)));
    world.now.set(millis(2000));
    assert_eq!(device.unmap(GuestPage(2), 1), Ok(()));
    assert_nothing_held(&world);
}

#[test]
fn removed_queue_holds_nothing() {
    let (mut device, world) = device(INSTANT);
    device.aqic(QUEUE, enable(2, 6));
    assert_eq!(device.remove(QUEUE), Ok(()));
    assert_nothing_held(&world);
    assert!(!device.outside().queues.tapq(QUEUE).0.interrupts);
    let status = device.aqic(QUEUE, enable(2, 6));
    assert_eq!(status.response, Response::QUEUE_NOT_AVAILABLE);
    assert_eq!(device.remove(QUEUE), Ok(()), "again");
}

#[test]
fn unplugged_card_holds_nothing() {
    let (mut device, world) = device(INSTANT);
    device.aqic(QUEUE, enable(2, 6));
    device.outside().queues.cards.unplug(ADAPTERS[0]);
    assert_eq!(device.remove(QUEUE), Ok(()));
    assert_nothing_held(&world);
}

#[test]
fn unassigned_queue_is_reset_and_holds_nothing() {
    for by_domain in [false, true] {
        let (mut device, world) = device(Latency {
            request: millis(1),
            ..INSTANT
        });
        device.aqic(QUEUE, enable(2, 6));
        request(&mut device, QUEUE);
        let result = if by_domain {
            device.unassign_domain(DOMAINS[0])
        } else {
            device.unassign_adapter(ADAPTERS[0])
        };
        assert_eq!(result, Ok(()));
        assert_nothing_held(&world);
        // Nothing of the request is left for the queue's next owner.
        assert!(device.outside().queues.tapq(QUEUE).0.empty);
        assert_eq!(request(&mut device, QUEUE), Response::QUEUE_NOT_AVAILABLE);
    }
}

#[test]
fn destroyed_guest_holds_nothing() {
    let (mut device, world) = device(Latency {
        reset: millis(10),
        interrupts: millis(10),
        request: millis(10),
    });
    for (i, apqn) in all_queues().enumerate() {
        device.aqic(apqn, enable(i as u64, 6));
    }
    world.now.set(millis(100));
    assert_eq!(world.subclasses.borrow()[&Subclass::new(6)], 4);
    assert_eq!(device.detach(), Ok(()));
    assert_nothing_held(&world);
    for apqn in all_queues() {
        let status = device.aqic(apqn, enable(0, 6));
        assert_eq!(status.response, Response::QUEUE_NOT_AVAILABLE);
        assert_eq!(device.tapq(apqn).1, Hardware::default());
    }
    assert_eq!(device.qci().matrix, ap::Matrix::default());
}

#[test]
fn deconfigured_queue_is_released() {
    let (mut device, world) = device(INSTANT);
    for (respond, go) in [
        (Response::DECONFIGURED, false),
        (Response::CHECKSTOPPED, true),
    ] {
        device.aqic(QUEUE, enable(2, 6));
        if go {
            device.outside().queues.cards.checkstop(ADAPTERS[0])
        } else {
            device.outside().queues.cards.configure(ADAPTERS[0], false)
        }
        let status = device.aqic(QUEUE, InterruptControl::Disable);
        assert_eq!(status.response, respond);
        assert_nothing_held(&world);
        device.outside().queues.cards.configure(ADAPTERS[0], true);
    }
}

#[test]
fn queue_outside_matrix_is_not_available() {
    let (mut device, _) = device(INSTANT);
    for apqn in [Apqn::new(2, 6), Apqn::new(1, 7), Apqn::new(0, 0)] {
        let gone = Response::QUEUE_NOT_AVAILABLE;
        assert_eq!(device.tapq(apqn).0.response, gone);
        assert_eq!(device.rapq(apqn).response, gone);
        assert_eq!(device.zapq(apqn).response, gone);
        assert_eq!(device.aqic(apqn, enable(0, 0)).response, gone);
        assert_eq!(request(&mut device, apqn), gone);
        assert_eq!(device.dqap(apqn, 1, false).0.response, gone);
    }
    device.assign_control_domain(200);
    let configuration = device.qci();
    assert_eq!(configuration.matrix.adapters, Mask::from_iter(ADAPTERS));
    assert_eq!(configuration.matrix.domains, Mask::from_iter(DOMAINS));
    assert_eq!(configuration.matrix.control_domains, Mask::from_iter([200]));
    // An adapter without any queue behind it is not there.
    for domain in DOMAINS {
        device.remove(Apqn::new(ADAPTERS[1], domain)).unwrap();
    }
    assert_eq!(device.qci().matrix.adapters, Mask::from_iter([ADAPTERS[0]]));
}

#[test]
fn queue_reports_busy_and_reset_in_progress() {
    let (mut device, world) = device(Latency {
        reset: millis(200),
        interrupts: millis(200),
        ..INSTANT
    });
    let status = device.aqic(QUEUE, enable(2, 6));
    assert_eq!(status.response, Response::NORMAL);
    assert_eq!(device.aqic(QUEUE, enable(2, 6)).response, Response::BUSY);
    world.now.set(millis(1000));
    device.rapq(QUEUE);
    for status in [
        device.rapq(QUEUE),
        device.tapq(QUEUE).0,
        device.aqic(QUEUE, enable(2, 6)),
        device.dqap(QUEUE, 1, false).0,
    ] {
        assert_eq!(status.response, Response::RESET_IN_PROGRESS);
    }
    assert_eq!(request(&mut device, QUEUE), Response::RESET_IN_PROGRESS);
    world.now.set(millis(2000));
    assert_eq!(device.tapq(QUEUE).0.response, Response::NORMAL);
    assert_nothing_held(&world);
}

#[test]
fn hook_answers_intercepted_aqic() {
    let (mut device, world) = device(INSTANT);
    let installed = Installed {
        host_instructions: true,
        host_adapter_interruptions: true,
        guest: Facilities::ALL,
    };
    let (gr1, gr2) = enable(2, 6).encode();
    let registers = Registers {
        gr: [0x0300_0000 | u64::from(QUEUE.get()), gr1, gr2],
        problem_state: false,
    };
    let outcome = intercept::pqap(installed, registers, Some(&mut device));
    let InterceptOutcome::Status(status) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(status.condition_code(), 0);
    assert_eq!(device.registration(QUEUE), held(2, 6));
    device.detach().unwrap();
    assert_nothing_held(&world);
}
