//! The gate between the hook and the machine's destruction, with real threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ap::gate::Gate;

#[test]
fn closed_gate_refuses_entry() {
    let gate = Gate::new();
    assert!(gate.enter().is_none() && gate.is_empty());
    gate.open();
    let one = gate.enter().unwrap();
    let two = gate.enter().unwrap();
    gate.close();
    assert!(gate.enter().is_none());
    assert!(!gate.is_empty());
    drop(one);
    assert!(!gate.is_empty());
    drop(two);
    assert!(gate.is_empty());
    gate.open();
    assert!(gate.enter().is_some());
}

/// vCPUs run the hook as fast as they can while the machine is destroyed; none of
/// them may see what was freed.
#[test]
fn gate_keeps_hook_out_of_destroyed_machine() {
    for _ in 0..300 {
        let gate = Gate::new();
        let [freed, seen, over] = [const { AtomicBool::new(false) }; 3];
        let ran = AtomicUsize::new(0);
        gate.open();
        let left = thread::scope(|scope| {
            let vcpu = || {
                while !over.load(Ordering::Relaxed) {
                    let Some(_inside) = gate.enter() else { break };
                    seen.fetch_or(freed.load(Ordering::Relaxed), Ordering::Relaxed);
                    ran.fetch_add(1, Ordering::Relaxed);
                    thread::yield_now();
                    seen.fetch_or(freed.load(Ordering::Relaxed), Ordering::Relaxed);
                }
            };
            scope.spawn(vcpu);
            scope.spawn(vcpu);
            while ran.load(Ordering::Relaxed) < 3 {
                thread::yield_now();
            }
            gate.close();
            let begun = Instant::now();
            while !gate.is_empty() && begun.elapsed() < Duration::from_secs(20) {
                thread::yield_now();
            }
            let left = gate.is_empty();
            freed.store(true, Ordering::Relaxed);
            thread::yield_now();
            over.store(true, Ordering::Relaxed);
            left
        });
        assert!(left, "somebody is still in the hook");
        assert!(
            !seen.load(Ordering::Relaxed),
            "the hook ran on what was freed"
        );
    }
}
