//! Reduction of a failing plan, and plans as text.

use crate::world::{Plan, run};
use anyhow::{Context, Result};

/// Removes steps of a failing plan as long as it still fails, in at most `runs` runs. Halves are
/// tried first, then smaller and smaller parts.
pub fn shrink(plan: &Plan, runs: usize) -> Plan {
    let mut best = plan.clone();
    let mut left = runs;
    let mut part = best.steps.len().div_ceil(2);
    while part > 0 {
        let mut at = 0;
        let mut removed = false;
        while at < best.steps.len() {
            if left == 0 {
                return best;
            }
            left -= 1;
            let end = (at + part).min(best.steps.len());
            let mut smaller = best.clone();
            smaller.steps.drain(at..end);
            if run(&smaller, false).failure.is_some() {
                best = smaller;
                removed = true;
            } else {
                at = end;
            }
        }
        if part == 1 && !removed {
            break;
        }
        part = if part == 1 { 1 } else { part.div_ceil(2) };
    }
    best
}

/// Writes steps as ranges, for example `0-7,9`.
pub fn format_steps(steps: &[u32]) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for step in steps {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *step => *last = *step,
            _ => ranges.push((*step, *step)),
        }
    }
    let text = ranges.into_iter().map(|(first, last)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    });
    text.collect::<Vec<_>>().join(",")
}

/// Reads steps that [`format_steps`] has written.
///
/// # Errors
/// The text is not a list of numbers and ranges.
pub fn parse_steps(text: &str) -> Result<Vec<u32>> {
    let mut steps = Vec::new();
    for range in text.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| {
            let number = text.trim().parse::<u32>();
            number.with_context(|| format!("steps: {range:?} is no range, for example 0-7,9"))
        };
        steps.extend(number(first)?..=number(last)?);
    }
    Ok(steps)
}
