"""Pipeline schedules as data: their language, their simulation, and two trainings on the same stages. Pure."""
