//! Parts of the model: memory with injected faults, a host, and a controller.

use std::cell::Cell as StdCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
// Not the model's own: its drop cannot run while a failed model unwinds. Who holds
// memory is not what is modelled.
use std::sync::Arc;

use doorbell::{Armed, Cell, Cells, HostBehaviour, ProtocolAccess, Publisher, Ring, Shadow, Watch};
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::sync::{Condvar, Mutex};

/// Fault that is injected into the code under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// No fault.
    None,
    /// The step is omitted: no fence, no store, or instead of a load the value of the cell's last
    /// load.
    Omit(ProtocolAccess),
    /// The step is executed with relaxed ordering.
    Relax(ProtocolAccess),
}

/// A cell of guest memory that injects faults.
pub struct Faulty {
    memory: Arc<AtomicU32>,
    fault: Fault,
    last: StdCell<u32>,
}

impl Faulty {
    fn ordering(&self, step: ProtocolAccess) -> Ordering {
        if self.fault == Fault::Relax(step) {
            Ordering::Relaxed
        } else {
            step.ordering()
        }
    }
}

impl Cell for Faulty {
    fn load(&self, step: ProtocolAccess) -> u32 {
        if self.fault != Fault::Omit(step) {
            self.last.set(self.memory.load(self.ordering(step)));
        }
        self.last.get()
    }

    fn store(&self, value: u32, step: ProtocolAccess) {
        if self.fault != Fault::Omit(step) {
            self.memory.store(value, self.ordering(step));
        }
    }

    fn fence(&self, step: ProtocolAccess) {
        if self.fault != Fault::Omit(step) {
            fence(step.ordering());
        }
    }
}

/// The worker's eventfd, and whether any thread is left that could signal it.
#[derive(Default)]
struct Kick {
    kicked: bool,
    over: bool,
}

/// State shared by both sides: the cells of one doorbell, the ring behind it, and the worker's
/// eventfd.
#[derive(Clone)]
pub struct World {
    pub size: u32,
    fault: Fault,
    register: Arc<AtomicU32>,
    pub entry: Arc<AtomicU32>,
    pub eventidx: Arc<AtomicU32>,
    ring: Arc<Vec<AtomicU32>>,
    kick: Arc<(Mutex<Kick>, Condvar)>,
}

/// Value of the cells before they are initialised, left by an earlier queue.
pub const STALE: u32 = 2;

impl World {
    pub fn new(size: u32, fault: Fault) -> Self {
        let cell = || Arc::new(AtomicU32::new(STALE));
        Self {
            size,
            fault,
            register: cell(),
            entry: cell(),
            eventidx: cell(),
            ring: Arc::new((0..size).map(|_| AtomicU32::new(u32::MAX)).collect()),
            kick: Arc::new((Mutex::new(Kick::default()), Condvar::new())),
        }
    }

    fn faulty(&self, memory: &Arc<AtomicU32>) -> Faulty {
        Faulty {
            memory: memory.clone(),
            fault: self.fault,
            last: StdCell::new(0),
        }
    }

    fn hold(&self) -> Held {
        Held {
            register: self.faulty(&self.register),
            entry: self.faulty(&self.entry),
            eventidx: self.faulty(&self.eventidx),
        }
    }

    /// Wakes the worker, as the server does after a register write.
    pub fn kick(&self) {
        self.kick.0.lock().unwrap().kicked = true;
        self.kick.1.notify_one();
    }

    /// Records that the host has finished, so that a controller that sleeps now is never woken.
    pub fn over(&self) {
        self.kick.0.lock().unwrap().over = true;
        self.kick.1.notify_one();
    }

    /// Sleeps until kicked.
    pub fn sleep(&self) {
        let mut state = self.kick.0.lock().unwrap();
        while !state.kicked && !state.over {
            state = self.kick.1.wait(state).unwrap();
        }
        // No deadlock: loom cannot unwind from one, and the mutants are to be caught.
        let lost = !state.kicked;
        state.kicked = false;
        drop(state);
        assert!(!lost, "lost wake-up: the controller sleeps for ever");
    }

    /// Returns the slot of the `n`th entry since the beginning.
    fn slot(&self, n: u32) -> &AtomicU32 {
        &self.ring[(n % self.size) as usize]
    }
}

/// Access of one side to the cells.
struct Held {
    register: Faulty,
    entry: Faulty,
    eventidx: Faulty,
}

impl Held {
    fn shadow(&self) -> Shadow<'_, Faulty> {
        Shadow {
            doorbell: &self.entry,
            eventidx: &self.eventidx,
        }
    }

    fn cells(&self, shadowed: bool) -> Cells<'_, Faulty> {
        Cells {
            register: &self.register,
            shadow: shadowed.then(|| self.shadow()),
        }
    }
}

/// Host that writes entries, publishes, and rings. `life` distinguishes its entries from those of
/// an earlier queue.
pub struct Host {
    world: World,
    held: Held,
    publisher: Publisher,
    life: u32,
    pub published: u32,
    /// Whether the host knows the shadow buffers.
    pub shadowed: bool,
    pub rings: u32,
}

impl Host {
    pub fn new(world: &World, behaviour: HostBehaviour, life: u32) -> Self {
        Self {
            world: world.clone(),
            held: world.hold(),
            publisher: Publisher::with_behaviour(world.size, behaviour),
            life,
            published: 0,
            shadowed: true,
            rings: 0,
        }
    }

    /// Writes `n` entries, publishes them together, and rings if required.
    pub fn submit(&mut self, n: u32) {
        for _ in 0..n {
            self.world
                .slot(self.published)
                .store(self.life + self.published, Ordering::Relaxed);
            self.published += 1;
        }
        self.publish(self.published);
    }

    /// Consumes `n` entries that the controller has posted (a CQ), and publishes the head.
    pub fn consume(&mut self, n: u32) {
        self.published += n;
        self.publish(self.published);
    }

    fn publish(&mut self, n: u32) {
        let new = n % self.world.size;
        let shadow = self.shadowed.then(|| self.held.shadow());
        if self.publisher.publish(shadow, new as u16) == Ring::Register {
            self.rings += 1;
            self.held.register.store(new, ProtocolAccess::HostRegister);
            self.world.kick();
        }
    }
}

/// Controller that polls, fetches, parks, arms, and sleeps.
pub struct Controller {
    world: World,
    held: Held,
    watch: Watch,
    life: u32,
    pub fetched: u32,
    /// Whether the buffers are in use.
    pub shadowed: bool,
}

impl Controller {
    /// Creates the controller's side of a new queue.
    pub fn create(world: &World, shadowed: bool, life: u32) -> Self {
        let held = world.hold();
        let watch = Watch::create(world.size, held.cells(shadowed));
        Self {
            world: world.clone(),
            held,
            watch,
            life,
            fetched: 0,
            shadowed,
        }
    }

    /// Executes Doorbell Buffer Config.
    pub fn attach(&mut self) {
        self.watch.attach(self.held.shadow());
        self.shadowed = true;
    }

    fn fetch(&mut self, tail: u32) {
        while self.fetched % self.world.size != tail {
            let content = self.world.slot(self.fetched).load(Ordering::Relaxed);
            assert_eq!(
                content,
                self.life + self.fetched,
                "an entry that the host had not written"
            );
            self.fetched += 1;
        }
    }

    /// Polls once. Returns whether a new value was found.
    pub fn poll(&mut self) -> bool {
        let before = self.fetched;
        let tail = self
            .watch
            .poll(self.held.cells(self.shadowed))
            .expect("a valid doorbell");
        self.fetch(tail);
        if self.fetched != before {
            self.watch.park(self.held.cells(self.shadowed));
        }
        self.fetched != before
    }

    /// Polls only if a spin poll reports news, which the poll must then find. Returns whether it
    /// did.
    pub fn spin_poll(&mut self) -> bool {
        if !self.watch.has_news(self.held.cells(self.shadowed)) {
            return false;
        }
        let before = self.watch.state();
        self.poll();
        assert_ne!(self.watch.state(), before, "news that no poll finds");
        true
    }

    /// Serves like [`Controller::serve_until_idle`], with spin polls instead of polls.
    pub fn spin_until_idle(&mut self) {
        while self.spin_poll() || !self.arm() {}
    }

    /// Polls once without parking EventIdx.
    pub fn poll_without_parking(&mut self) {
        let tail = self
            .watch
            .poll(self.held.cells(self.shadowed))
            .expect("a valid doorbell");
        self.fetch(tail);
    }

    /// Arms the doorbell. Returns whether the controller may sleep.
    pub fn arm(&mut self) -> bool {
        let armed = self
            .watch
            .arm(self.held.cells(self.shadowed))
            .expect("a valid doorbell");
        self.after(armed)
    }

    /// Checks the doorbell again after arming. Returns whether the controller may still sleep.
    pub fn recheck(&mut self) -> bool {
        let armed = self
            .watch
            .recheck(self.held.cells(self.shadowed))
            .expect("a valid doorbell");
        self.after(armed)
    }

    fn after(&mut self, armed: Armed) -> bool {
        match armed {
            Armed::Idle => true,
            Armed::Raced(tail) => {
                self.fetch(tail);
                self.watch.park(self.held.cells(self.shadowed));
                false
            }
        }
    }

    /// Serves until `total` entries have been fetched; sleeps whenever there is nothing to do.
    pub fn serve_until(&mut self, total: u32) {
        while self.fetched < total {
            if !self.poll() && self.arm() {
                self.world.sleep();
            }
        }
        assert_eq!(
            self.fetched, total,
            "an entry that the host never published"
        );
    }

    /// Serves until there is nothing to do and the controller may sleep.
    pub fn serve_until_idle(&mut self) {
        while self.poll() || !self.arm() {}
    }

    /// Waits until the host has made room in a CQ with entries posted up to `tail`.
    pub fn wait_for_room(&mut self, tail: u32) -> u32 {
        let size = self.world.size;
        loop {
            let head = self
                .watch
                .poll(self.held.cells(self.shadowed))
                .expect("a valid doorbell");
            if doorbell::advance(tail, 1, size) != head {
                return head;
            }
            if self.watch.arm(self.held.cells(self.shadowed)) == Ok(Armed::Idle) {
                self.world.sleep();
            }
        }
    }

    pub fn park_until(&mut self, horizon: u32) {
        self.watch
            .park_until(self.held.cells(self.shadowed), horizon);
    }
}

/// Explores every interleaving.
pub fn check(model: impl Fn() + Send + Sync + 'static) {
    loom::model::Builder::new().check(model);
}

/// Explores every interleaving with at most `preemptions` preemptions, and every value
/// that each load may return.
pub fn check_bounded(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Returns whether some interleaving of the model fails.
pub fn fails(model: impl Fn() + Send + Sync + 'static) -> bool {
    catch_unwind(AssertUnwindSafe(|| check_bounded(3, model))).is_err()
}
