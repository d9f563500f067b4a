//! A sweep as an SVG.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;

use super::report;
use super::sweep::Point;

/// One line of the plot: its name, its colour, and what it shows of a point.
type Line = (&'static str, RGBColor, fn(&Point) -> f64);

const LINES: [Line; 3] = [
    ("raw TCP stream", RGBColor(120, 120, 120), |point| point.raw),
    ("sealift, integrity off", RGBColor(230, 120, 20), |point| point.integrity_off),
    ("sealift, integrity on", RGBColor(20, 90, 200), |point| point.integrity_on),
];

/// Draws `points` into `file`.
pub(super) fn draw(file: &Path, points: &[Point]) -> Result<()> {
    let svg = render(points).map_err(|why| anyhow!("drawing: {why}"))?;
    std::fs::write(file, svg).with_context(|| format!("writing {}", file.display()))
}

fn render(points: &[Point]) -> Result<String, Box<dyn std::error::Error + '_>> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (800, 500)).into_drawing_area();
        area.fill(&WHITE)?;
        let sizes = points.iter().map(|point| f64::from(point.block_bytes));
        let (least, most) = sizes.fold((f64::MAX, 1.0f64), |(l, m), s| (l.min(s), m.max(s)));
        let rates = points.iter().flat_map(|point| LINES.map(|(_, _, of)| of(point)));
        let top = rates.fold(0.1, f64::max) * 1.15;
        let mut chart = ChartBuilder::on(&area)
            .caption("sealift: rate by block size, 256 MiB requests", ("sans-serif", 20))
            .margin(15)
            .x_label_area_size(45)
            .y_label_area_size(60)
            .build_cartesian_2d((least.min(most)..most).log_scale().base(2.0), 0.0..top)?;
        chart
            .configure_mesh()
            .x_desc("block size (bytes, logarithmic)")
            .y_desc("GB/s")
            .x_labels(16)
            .x_label_formatter(&|size| report::size(*size as u64))
            .y_label_formatter(&|rate| format!("{rate:.1}"))
            .draw()?;
        for (name, color, of) in LINES {
            let line = points.iter().map(|point| (f64::from(point.block_bytes), of(point)));
            chart
                .draw_series(LineSeries::new(line.clone(), color.stroke_width(2)))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color));
            chart.draw_series(line.map(|at| Circle::new(at, 3, color.filled())))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE)
            .border_style(RGBColor(160, 160, 160))
            .draw()?;
        area.present()?;
    }
    Ok(svg)
}
