//! A hostile guest's AP instructions: any registers, any storage, any messages, against a
//! mediated device with accelerators below, while the host unmaps pages, takes queues
//! away and destroys the guest.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use ap::card::{Cards, Latency, Layout, Notify};
use ap::instruction::{Cpu, execute};
use ap::outside::{
    CannotPin, CannotRegister, Clock, GuestPage, HostAddress, HostSubclass, InterruptTarget,
    PAGE_SIZE, Pages, Subclasses,
};
use ap::{Apqn, Facilities, Mask, Mediated, Outside, ProgramException, Subclass};
use ap_accel::Accelerator;

/// Pages of the guest.
const PAGES: u64 = 4;
const ADAPTERS: [u8; 2] = [0, 5];
const DOMAINS: [u8; 2] = [6, 255];
/// The longest type 50 message.
const LARGEST: usize = 3088;

/// Pins, registrations and time.
#[derive(Default)]
struct World {
    now: Cell<u64>,
    pins: RefCell<BTreeMap<GuestPage, u32>>,
    subclasses: RefCell<BTreeMap<Subclass, u32>>,
}

#[derive(Clone)]
struct Shared(Rc<World>);

fn take<K: Ord>(counts: &RefCell<BTreeMap<K, u32>>, key: K) {
    let mut counts = counts.borrow_mut();
    let count = counts.get_mut(&key).expect("released once too often");
    *count -= 1;
    if *count == 0 {
        counts.remove(&key);
    }
}

impl Pages for Shared {
    fn pin(&mut self, page: GuestPage) -> Result<HostAddress, CannotPin> {
        if page.0 >= PAGES {
            return Err(CannotPin);
        }
        *self.0.pins.borrow_mut().entry(page).or_default() += 1;
        Ok(HostAddress(page.0 * PAGE_SIZE))
    }

    fn unpin(&mut self, page: GuestPage) {
        take(&self.0.pins, page);
    }
}

impl Subclasses for Shared {
    fn register(&mut self, subclass: Subclass) -> Result<HostSubclass, CannotRegister> {
        *self.0.subclasses.borrow_mut().entry(subclass).or_default() += 1;
        Ok(HostSubclass(0))
    }

    fn unregister(&mut self, subclass: Subclass) {
        take(&self.0.subclasses, subclass);
    }
}

impl Clock for Shared {
    fn now(&self) -> u64 {
        self.0.now.get()
    }

    fn wait(&mut self, nanoseconds: u64) {
        self.0.now.set(self.0.now.get() + nanoseconds);
    }
}

impl Notify for Shared {
    fn notify(&mut self, apqn: Apqn, target: InterruptTarget) {
        let page = GuestPage::of(target.notification.0);
        let pinned = self.0.pins.borrow().contains_key(&page);
        assert!(pinned, "{apqn} writes to {page:?}, which is not pinned");
    }
}

/// A processor with a small storage that wraps around nowhere.
struct Processor {
    gr: [u64; 16],
    mask: u64,
    storage: Vec<u8>,
}

impl Processor {
    fn at(&mut self, address: u64, len: usize) -> Result<&mut [u8], ProgramException> {
        let from = usize::try_from(address).map_err(|_| ProgramException::Addressing)?;
        let to = from.checked_add(len).ok_or(ProgramException::Addressing)?;
        self.storage
            .get_mut(from..to)
            .ok_or(ProgramException::Addressing)
    }
}

impl Cpu for Processor {
    fn gr(&self, register: u8) -> u64 {
        self.gr[usize::from(register)]
    }

    fn set_gr(&mut self, register: u8, value: u64) {
        self.gr[usize::from(register)] = value;
    }

    fn psw_mask(&self) -> u64 {
        self.mask
    }

    fn load(&mut self, address: u64, into: &mut [u8]) -> Result<(), ProgramException> {
        into.copy_from_slice(self.at(address, into.len())?);
        Ok(())
    }

    fn store(&mut self, address: u64, bytes: &[u8]) -> Result<(), ProgramException> {
        self.at(address, bytes.len())?.copy_from_slice(bytes);
        Ok(())
    }
}

/// Takes bytes from the input; zeroes when it is used up.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    fn queue(&mut self) -> Apqn {
        let kind = usize::from(self.byte());
        Apqn::new(ADAPTERS[kind % 2], DOMAINS[kind / 2 % 2])
    }

    fn millis(&mut self) -> u64 {
        u64::from(self.byte()) * 1_000_000
    }

    /// A register that often is an address, a length, or nothing.
    fn register(&mut self) -> u64 {
        let kind = self.byte();
        match kind % 4 {
            0 => self.u64(),
            1 => u64::from(self.byte()) * 64,
            2 => [400, 784, 1552, 464, 912, 1808, 64, 1 << 47][usize::from(kind / 4 % 8)],
            _ => u64::from(kind / 4),
        }
    }
}

/// The target.
pub fn ap(data: &[u8]) {
    run(data);
}

/// Runs an input; answers how many instructions ended with condition code 0.
fn run(data: &[u8]) -> u32 {
    let mut done = 0;
    let mut input = Input(data);
    let world = Rc::new(World::default());
    let shared = || Shared(Rc::clone(&world));
    let layout = Layout {
        domains: Mask::from_iter(DOMAINS),
        depth: input.byte() % 20,
        largest_request: LARGEST,
        latency: Latency {
            reset: input.millis(),
            interrupts: input.millis(),
            request: input.millis(),
        },
    };
    let mut cards = Cards::new(layout, shared(), shared());
    for adapter in ADAPTERS {
        cards.plug(adapter, Accelerator);
    }
    let mut device = Mediated::new(Outside {
        pages: shared(),
        subclasses: shared(),
        clock: shared(),
        queues: cards,
    });
    for (adapter, domain) in ADAPTERS.into_iter().flat_map(|a| DOMAINS.map(|d| (a, d))) {
        device.assign_adapter(adapter);
        device.assign_domain(domain);
        device.bind(Apqn::new(adapter, domain));
    }
    let _ = device.attach();
    let mut cpu = Processor {
        gr: [0; 16],
        mask: 3 << 31,
        storage: vec![0; (PAGES * PAGE_SIZE) as usize],
    };
    for _ in 0..200 {
        if input.0.is_empty() {
            break;
        }
        match input.byte() % 16 {
            0..8 => {
                let [operation, registers] = [input.byte(), input.byte()];
                let code = [0xb2, 0xad + operation % 4, 0, registers & 0xee];
                let flags = input.byte();
                cpu.gr[0] = u64::from(flags) << 24 | u64::from(input.queue().get());
                let condition = execute(&mut cpu, code, Facilities::ALL, &mut device);
                done += u32::from(condition == Ok(0));
            }
            8 => {
                let register = usize::from(input.byte() % 16);
                cpu.gr[register] = input.register();
            }
            9 => {
                // A message of type 50, with a length that fits more often than not.
                let (at, format) = (usize::from(input.byte()) * 16, input.byte());
                let length = [400_u16, 784, 1552, 464, 912, 1808][usize::from(format % 6)];
                let kind = [1, 2, 3, 0x11, 0x12, 0x13][usize::from(format % 6)];
                let [high, low] = length.to_be_bytes();
                let head = [0, 0x50, high, low, 0, 0, 0, 0, 0, kind];
                let _ = cpu.store(at as u64, &head);
            }
            10 => {
                let at = u64::from(input.byte()) * 64 + 63;
                let number = input.u64().to_be_bytes();
                let _ = cpu.store(at, &number);
            }
            11 => world.now.set(world.now.get() + input.millis()),
            12 => {
                let (first, count) = (u64::from(input.byte()), u64::from(input.byte()));
                let _ = device.unmap(GuestPage(first), count);
            }
            13 => {
                let queue = input.queue();
                match input.byte() % 4 {
                    0 => drop(device.remove(queue)),
                    1 => drop(device.unassign_adapter(queue.adapter())),
                    2 => drop(device.unassign_domain(queue.domain())),
                    _ => {
                        device.bind(queue);
                        device.assign_adapter(queue.adapter());
                        device.assign_domain(queue.domain());
                    }
                }
            }
            14 => {
                let cards = &mut device.outside().queues;
                match input.byte() % 4 {
                    0 => cards.checkstop(ADAPTERS[0]),
                    1 => cards.configure(ADAPTERS[0], false),
                    _ => cards.configure(ADAPTERS[0], true),
                }
            }
            _ => match input.byte() % 3 {
                0 => drop(device.detach()),
                1 => drop(device.attach()),
                _ => drop(device.poll()),
            },
        }
    }
    // The guest is destroyed; queues that are late get their time.
    for _ in 0..10 {
        if device.detach().is_ok() && device.poll().is_ok() {
            break;
        }
    }
    assert!(world.pins.borrow().is_empty(), "pages stay pinned");
    assert!(
        world.subclasses.borrow().is_empty(),
        "subclasses stay registered"
    );
    done
}

#[cfg(test)]
mod tests {
    /// Random inputs from a fixed seed, and an empty one; some instructions must get through.
    #[test]
    fn random_instructions_end() {
        super::ap(&[]);
        let mut chance = crate::chance::Chance::new();
        let mut done = 0;
        for round in 0..3000 {
            let data = chance.bytes(64 + round % 800);
            done += super::run(&data);
        }
        assert!(done > 1000, "{done} instructions ended well");
    }
}
