//! Random commands of several hosts beside a model: every status, every right, every report.
//! (`reservations/tests/it/model.rs` compares that model with a naive one.)

use crate::common::*;
use crate::reservations::world::*;
use nvme::cmd::reservation::{
    AcquireCdw10, AcquireData, Racqa, RegisterCdw10, RegisterData, ReleaseCdw10, ReleaseData,
    Rrega, Rrela, Rtype,
};
use nvme::{NvmOpcode, Status};
use reservations::{Notification, Operation, ReservationRefusal, Reservations};
use std::collections::VecDeque;

struct Chance(u64);

impl Chance {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % end
    }
}

/// Controllers 1 and 2 belong to one host, 3 and 4 to one each.
const HOSTS: [u8; 4] = [1, 1, 2, 3];

#[test]
fn random_reservations_match_model() {
    let mut w = World::of(&HOSTS);
    let mut model = Reservations::new(false);
    let mut blocks = [0u8; 16];
    let mut told: Vec<VecDeque<Notification>> = vec![VecDeque::new(); HOSTS.len()];
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    let (mut conflicts, mut done) = (0u64, 0u64);
    for step in 0..steps("VNVME_RESERVATION_STEPS", 20_000) {
        let who = chance.below(4) as usize;
        let host = host_id(HOSTS[who]);
        let access = model.access(&host);
        let block = chance.below(16);
        match chance.below(8) {
            0 | 1 => {
                let byte = chance.below(256) as u8;
                let status = plain(w.write(who, block, byte));
                if access.write {
                    blocks[block as usize] = byte
                } else {
                    conflicts += 1
                }
                let expected = if access.write {
                    Status::SUCCESS
                } else {
                    CONFLICT
                };
                assert_eq!(status, expected, "step {step}");
            }
            2 => {
                let read = w.read(who, block).map_err(plain);
                let expected = if access.read {
                    Ok(blocks[block as usize])
                } else {
                    Err(CONFLICT)
                };
                assert_eq!(read, expected, "step {step}");
            }
            3 => {
                let extended = chance.below(2) == 0;
                let controller = |host: &_| {
                    let at = HOSTS.iter().position(|number| host_id(*number) == *host)?;
                    Some(at as u16 + 1)
                };
                let expected = model.report(extended, controller);
                let (status, report) = w.report(who, extended, 4096);
                assert_eq!(status, Status::SUCCESS);
                assert_eq!(report[..expected.len()], expected[..], "step {step}");
                // What lies behind is not touched.
                assert!(report[expected.len()..].iter().all(|byte| *byte == 0xee));
            }
            _ => {
                let keys = [chance.below(4), chance.below(4)];
                let rtype = Rtype(chance.below(8) as u8);
                let action = chance.below(4) as u8;
                let iekey = chance.below(8) == 0;
                let (command, operation) = match chance.below(8) {
                    0..3 => {
                        let cdw10 = RegisterCdw10::new()
                            .with_rrega(Rrega(action))
                            .with_iekey(iekey);
                        let data = RegisterData {
                            crkey: keys[0].into(),
                            nrkey: keys[1].into(),
                        };
                        let opcode = NvmOpcode::RESERVATION_REGISTER;
                        let command = w.reservation(who, opcode, cdw10.into_bits(), keys);
                        (command, Operation::register(cdw10, &data))
                    }
                    3..6 => {
                        let cdw10 = AcquireCdw10::new()
                            .with_racqa(Racqa(action))
                            .with_iekey(iekey)
                            .with_rtype(rtype);
                        let data = AcquireData {
                            crkey: keys[0].into(),
                            prkey: keys[1].into(),
                        };
                        let opcode = NvmOpcode::RESERVATION_ACQUIRE;
                        let command = w.reservation(who, opcode, cdw10.into_bits(), keys);
                        (command, Operation::acquire(cdw10, &data))
                    }
                    _ => {
                        let cdw10 = ReleaseCdw10::new()
                            .with_rrela(Rrela(action))
                            .with_iekey(iekey)
                            .with_rtype(rtype);
                        let data = ReleaseData {
                            crkey: keys[0].into(),
                        };
                        let opcode = NvmOpcode::RESERVATION_RELEASE;
                        let command = w.reservation(who, opcode, cdw10.into_bits(), keys);
                        (command, Operation::release(cdw10, &data))
                    }
                };
                let result = operation.and_then(|operation| model.execute(&host, &operation));
                let expected = result.as_ref().map_or_else(
                    |refusal: &ReservationRefusal| plain(refusal.status()),
                    |_| Status::SUCCESS,
                );
                if let Ok(change) = result {
                    done += 1;
                    for notice in change.notices {
                        for (at, queue) in told.iter_mut().enumerate() {
                            if host_id(HOSTS[at]) == notice.host {
                                queue.push_back(notice.notification);
                            }
                        }
                    }
                }
                assert_eq!(plain(w.command(who, command)), expected, "step {step}");
            }
        }
        // Log pages are read now and then: they tell of everything, in order, up to their number.
        if chance.below(64) == 0 {
            w.rounds(3);
            let queue = &mut told[who];
            let seen = queue.len().min(64);
            for left in (0..seen).rev() {
                let (status, page) = w.hosts[who].log(0x80, 64, 0, false);
                assert_eq!(status, Status::SUCCESS);
                let expected = queue.pop_front().unwrap().log_page_type();
                assert_eq!(page[8], expected.0, "step {step}");
                assert_eq!(usize::from(page[9]), left, "step {step}");
                assert_eq!(page[12..16], [1, 0, 0, 0]);
            }
            queue.clear();
            let (_, page) = w.hosts[who].log(0x80, 64, 0, false);
            assert_eq!(page, [0; 64], "step {step}");
        }
    }
    println!("{conflicts} writes were refused, {done} operations carried out");
    assert!(conflicts > 0 && done > 0);
}
