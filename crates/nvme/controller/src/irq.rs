//! Interrupts: MSI-X vectors, and the INTx pin for hosts that use neither MSI nor MSI-X.
//!
//! The crate does not know the receivers of interrupts. A vector signals an [`IrqSink`], in
//! practice an eventfd. The MSI-X table itself is in the VMM. The interrupt of a vector without a
//! receiver is kept in the pending bit array.

use crate::config::MAX_IO_QUEUES;
use crate::survival::state::Interrupts;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Receiver of an interrupt, for example an eventfd. `signal` must not block, and has no way to
/// report an error, because it is called on the data path.
pub trait IrqSink: Send + Sync {
    /// Delivers one interrupt to the guest, for example by signalling an eventfd. Must not block.
    fn signal(&self);

    /// Returns the number under which the keeper holds the receiver, so that the next process can
    /// restore it; `None` when the receiver is not kept.
    fn kept(&self) -> Option<NonZeroU32> {
        None
    }
}

/// Returns the number under which the keeper process keeps an interrupt receiver, or 0 if it does
/// not.
fn number(sink: &Arc<dyn IrqSink>) -> u32 {
    sink.kept().map_or(0, NonZeroU32::get)
}

/// Number of 64-bit words in the pending bit array: one bit for the vector of each I/O queue pair
/// and of the admin queue.
const WORDS: usize = MAX_IO_QUEUES as usize / 64 + 1;

#[derive(Default)]
struct Vector {
    sink: Option<Arc<dyn IrqSink>>,
}

/// MSI-X pending bit array, shared by all engines of a controller. A bit is set only while its
/// vector has no receiver.
#[derive(Default)]
pub struct Pending([AtomicU64; WORDS]);

impl Pending {
    fn word(&self, vector: u16) -> Option<(&AtomicU64, u64)> {
        let word = self.0.get(usize::from(vector / 64))?;
        Some((word, 1 << (vector % 64)))
    }

    fn set(&self, vector: u16) {
        if let Some((word, bit)) = self.word(vector) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    fn take(&self, vector: u16) -> bool {
        self.word(vector)
            .is_some_and(|(word, bit)| word.fetch_and(!bit, Ordering::Relaxed) & bit != 0)
    }

    fn any(&self) -> bool {
        self.0.iter().any(|word| word.load(Ordering::Relaxed) != 0)
    }

    fn get(&self, vector: usize) -> bool {
        let found = u16::try_from(vector).ok().and_then(|v| self.word(v));
        found.is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }

    fn clear(&self) {
        for word in &self.0 {
            word.store(0, Ordering::Relaxed);
        }
    }
}

/// State of the INTx pin. The host sees its level as edges: the pin is masked after each interrupt,
/// until the VMM unmasks it (VFIO's automasked INTx).
#[derive(Default)]
struct Pin {
    sink: Option<Arc<dyn IrqSink>>,
    /// Interrupt Status (PCI status register): an interrupt is pending. Interrupt Disable does not
    /// affect it.
    wanted: bool,
    /// Level of the INTx pin as the host sees it.
    level: bool,
    masked: bool,
    /// Interrupt Disable bit of the PCI command register, which disables the INTx pin.
    disabled: bool,
}

/// Interrupt state of one engine (MSI-X vectors and INTx pin), used by its thread only.
pub struct Irqs {
    vectors: Vec<Vector>,
    pending: Arc<Pending>,
    /// Bus Master Enable. MSI-X interrupts are memory writes, which need it; the pin does not.
    messages: bool,
    /// Number of MSI-X vectors that have a receiver.
    receivers: u16,
    pin: Pin,
    /// Interrupt mask (INTMS and INTMC), which affects only pin-based interrupts ("NVMe over PCIe
    /// Transport 1.1", 3.1.3).
    intms: u32,
    /// Number of interrupts that were delivered so far.
    pub delivered: u64,
}

impl Irqs {
    /// Creates the interrupt state for `vectors` MSI-X vectors without receivers.
    pub fn new(vectors: u16, pending: Arc<Pending>) -> Self {
        Irqs {
            pending,
            messages: false,
            vectors: (0..vectors).map(|_| Vector::default()).collect(),
            receivers: 0,
            pin: Pin::default(),
            intms: 0,
            delivered: 0,
        }
    }

    /// Returns the receiver of each MSI-X vector that has one, with the vector's number.
    pub fn sinks(&self) -> impl Iterator<Item = (u16, Arc<dyn IrqSink>)> {
        let sink = |(v, vector): (usize, &Vector)| Some((v as u16, vector.sink.clone()?));
        self.vectors.iter().enumerate().filter_map(sink)
    }

    /// Returns the interrupt state for the next process.
    pub(crate) fn save(&self) -> Interrupts {
        Interrupts {
            vectors: self.sinks().map(|(v, sink)| (v, number(&sink))).collect(),
            pin: self.pin.sink.as_ref().map(number),
            pin_masked: self.pin.masked,
            intms: self.intms,
        }
    }

    /// Returns whether any vector or the pin still uses the receiver that is kept under the number
    /// `wanted`.
    pub(crate) fn needs(&self, wanted: NonZeroU32) -> bool {
        let vectors = self.vectors.iter().filter_map(|v| v.sink.as_ref());
        let mut sinks = vectors.chain(self.pin.sink.as_ref());
        sinks.any(|sink| sink.kept() == Some(wanted))
    }

    /// Restores the state saved by [`Irqs::save`]. Call it after the receivers are set.
    pub(crate) fn restore(&mut self, saved: &Interrupts) {
        self.pin.masked = saved.pin_masked;
        self.intms = saved.intms;
    }

    /// Returns the number of MSI-X vectors that the controller has.
    pub fn vectors(&self) -> u16 {
        self.vectors.len() as u16
    }

    /// Sets or removes the receiver of an MSI-X vector. Unknown vector numbers are ignored: the VMM
    /// knows how many vectors exist.
    pub fn set_vector(&mut self, vector: u16, sink: Option<Arc<dyn IrqSink>>) {
        if let Some(v) = self.vectors.get_mut(usize::from(vector)) {
            self.receivers -= u16::from(v.sink.is_some());
            self.receivers += u16::from(sink.is_some());
            v.sink = sink;
        }
    }

    /// Delivers pending interrupts to vectors that have a receiver. Only the engine of the
    /// controller's own worker calls this: another engine might signal a receiver that was removed.
    pub fn deliver_pending(&mut self) {
        if !self.messages || !self.pending.any() {
            return;
        }
        for (vector, v) in (0..).zip(&self.vectors) {
            if let Some(sink) = &v.sink
                && self.pending.take(vector)
            {
                sink.signal();
                self.delivered += 1;
            }
        }
    }

    /// Sets Bus Master Enable. While it is clear no pending interrupt is delivered, and
    /// [`Irqs::trigger`] must not be called.
    pub fn set_messages(&mut self, on: bool) {
        self.messages = on;
    }

    /// Sets or removes the receiver of the INTx pin.
    pub fn set_pin(&mut self, sink: Option<Arc<dyn IrqSink>>) {
        self.pin.sink = sink;
        self.pin.masked = false;
        self.deliver_pin();
    }

    /// Returns whether interrupts use the INTx pin: the pin has a receiver, and no MSI-X vector has
    /// one.
    pub fn pin_based(&self) -> bool {
        self.pin.sink.is_some() && self.receivers == 0
    }

    /// Delivers one interrupt on an MSI-X vector.
    pub fn trigger(&mut self, vector: u16) {
        if let Some(v) = self.vectors.get_mut(usize::from(vector)) {
            match &v.sink {
                Some(sink) => {
                    sink.signal();
                    self.delivered += 1;
                }
                None => self.pending.set(vector),
            }
        }
    }

    /// Sets the level of the INTx pin: high while any completion queue with interrupts enabled has
    /// entries that the host has not consumed.
    pub fn set_level(&mut self, level: bool) {
        self.pin.wanted = level && self.intms & 1 == 0;
        let level = self.pin.wanted && !self.pin.disabled;
        if self.pin.level != level {
            self.pin.level = level;
            self.deliver_pin();
        }
    }

    fn deliver_pin(&mut self) {
        if self.pin.level
            && !self.pin.masked
            && let Some(sink) = &self.pin.sink
        {
            sink.signal();
            self.delivered += 1;
            self.pin.masked = true;
        }
    }

    /// Returns Interrupt Status of the PCI status register: the INTx pin is in use and has an
    /// interrupt pending.
    pub fn pin_status(&self) -> bool {
        self.pin_based() && self.pin.wanted
    }

    /// Sets Interrupt Disable of the PCI command register. Call [`Irqs::set_level`] afterwards.
    pub fn disable_pin(&mut self, disabled: bool) {
        self.pin.disabled = disabled;
    }

    /// Masks the INTx pin on behalf of the VMM.
    pub fn mask_pin(&mut self) {
        self.pin.masked = true;
    }

    /// Unmasks the INTx pin on behalf of the VMM. If the level is still high, an interrupt is
    /// delivered.
    pub fn unmask_pin(&mut self) {
        self.pin.masked = false;
        self.deliver_pin();
    }

    /// Sets bits of the interrupt mask (register INTMS).
    pub fn intms_set(&mut self, bits: u32) {
        self.intms |= bits;
        if self.intms & 1 != 0 {
            self.pin.wanted = false;
            self.pin.level = false;
        }
    }

    /// Clears bits of the interrupt mask (register INTMC). Call [`Irqs::set_level`] afterwards.
    pub fn intms_clear(&mut self, bits: u32) {
        self.intms &= !bits;
    }

    /// Returns the interrupt mask, the value of both INTMS and INTMC.
    pub fn intms(&self) -> u32 {
        self.intms
    }

    /// Copies the MSI-X pending bit array from byte `offset`: one bit per vector, little endian.
    pub fn read_pba(&self, offset: usize, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            let first = offset.saturating_add(i).saturating_mul(8);
            *byte = (0..8)
                .filter(|bit| first.checked_add(*bit).is_some_and(|v| self.pending.get(v)))
                .fold(0, |acc, bit| acc | 1 << bit);
        }
    }

    /// Handles a controller-level reset: clears pending interrupts and the mask, and lowers the
    /// INTx pin. Receivers belong to the VMM and stay. Only the engine of the controller's own
    /// worker calls this: pending bits are shared, and another engine might clear newer ones.
    pub fn reset(&mut self) {
        self.pending.clear();
        self.intms = 0;
        self.pin.wanted = false;
        self.pin.level = false;
    }

    /// Removes all receivers after the VMM has disconnected. The reset clears pending interrupts.
    pub fn forget_sinks(&mut self) {
        for v in &mut self.vectors {
            *v = Vector::default();
        }
        self.receivers = 0;
        self.pin = Pin::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[derive(Default)]
    struct Count(AtomicU32);
    impl IrqSink for Count {
        fn signal(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    impl Count {
        fn take(&self) -> u32 {
            self.0.swap(0, Ordering::Relaxed)
        }
    }

    #[test]
    fn vector_without_receiver_stays_pending() {
        let mut irqs = Irqs::new(10, Arc::default());
        irqs.set_messages(true);
        irqs.trigger(9);
        irqs.trigger(9);
        let mut pba = [0; 3];
        irqs.read_pba(0, &mut pba);
        assert_eq!(pba, [0, 2, 0]);
        let sink = Arc::new(Count::default());
        irqs.set_vector(9, Some(sink.clone()));
        irqs.deliver_pending();
        assert_eq!(sink.take(), 1);
        irqs.read_pba(0, &mut pba);
        assert_eq!(pba, [0; 3]);
        irqs.trigger(9);
        assert_eq!(sink.take(), 1);
        irqs.trigger(10);
        irqs.set_vector(11, None);
    }

    #[test]
    fn pin_fires_again_after_unmask_while_high() {
        let mut irqs = Irqs::new(2, Arc::default());
        let sink = Arc::new(Count::default());
        irqs.set_pin(Some(sink.clone()));
        assert!(irqs.pin_based());
        irqs.set_level(true);
        irqs.set_level(true);
        assert_eq!(sink.take(), 1, "automasked");
        irqs.unmask_pin();
        assert_eq!(sink.take(), 1, "still high");
        irqs.set_level(false);
        irqs.unmask_pin();
        assert_eq!(sink.take(), 0);
        irqs.intms_set(1);
        irqs.set_level(true);
        assert_eq!(sink.take(), 0, "masked by INTMS");
        irqs.intms_clear(1);
        irqs.set_level(true);
        assert_eq!(sink.take(), 1);
    }
}
