//! Fetches and makes everything that a guest needs, so that a later run needs no network.
fn main() -> anyhow::Result<()> {
    let cache = harness::Cache::open()?;
    let image = harness::image::Image::get(&cache)?;
    println!("{}", image.kernel.display());
    Ok(())
}
